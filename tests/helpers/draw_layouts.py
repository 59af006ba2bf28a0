"""Drawings of one packed micro batch in every parallel layout, for docs/layouts.md.

The drawn data come from the trainer through layout_parts.py. `python -m tests.helpers.draw_layouts` writes
docs/pictures/layouts/*.svg.
"""

import html
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.layout_parts import (
    GEOMETRY,
    LAYOUTS,
    QWEN_2B,
    SEQ_LEN,
    Layout,
    Part,
    deal_bins,
    gathered_images,
    joined_images,
    make_bin,
    parts_of,
)
from trainer.data.micro_batch import MicroBatch

PICTURES = Path(__file__).parents[2] / "docs/pictures/layouts"
CELL, LEFT, RIGHT, PATCH = 18, 132, 16, 8
WIDTH = LEFT + SEQ_LEN * CELL + RIGHT
TEXT_FILL = ("#cfe2f7", "#fbdcb8", "#d0ebd0")  # one colour per sample
IMAGE_FILL = ("#1f5fa8", "#b35900", "#2b7a30")
INK, FAINT, PADDING, ABSENT, ABSENT_LINE = "#1c1c1c", "#5c5c5c", "#c4c4c4", "#ffffff", "#dedede"


class Sheet:
    """A drawing that grows downwards. `y` is the position of the next element."""

    def __init__(self, layout: Layout) -> None:
        self.y = 24
        self.items: list[str] = []
        self.text(16, layout.title, size=16, bold=True)
        self.y += 19
        self.text(16, layout.says, fill=FAINT)
        self.y += 14

    def text(
        self,
        x: float,
        words: str,
        *,
        dy: float = 0,
        size: int = 12,
        bold: bool = False,
        fill: str = INK,
        anchor: str = "start",
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.items.append(
            f'<text x="{x:g}" y="{self.y + dy:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
            f"{html.escape(words)}</text>"
        )

    def box(self, x: float, width: float, height: float, fill: str, *, dy: float = 0, line: str = "#ffffff") -> None:
        self.items.append(
            f'<rect x="{x:g}" y="{self.y + dy:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}"/>'
        )

    def dot(self, x: float, *, dy: float) -> None:
        self.items.append(f'<circle cx="{x:g}" cy="{self.y + dy:g}" r="3.5" fill="{INK}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, arrow: bool = False) -> None:
        head = ' marker-end="url(#head)"' if arrow else ""
        self.items.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"{head}/>')

    def render(self) -> str:
        """Return the SVG on a white background."""
        size = f'width="{WIDTH}" height="{self.y:g}" viewBox="0 0 {WIDTH} {self.y:g}"'
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">',
                f"<defs>{head}</defs>",
                f'<rect width="{WIDTH}" height="{self.y:g}" fill="#ffffff"/>',
                *self.items,
                "</svg>\n",
            ]
        )


def column(place: int) -> float:
    """Return the x position at which a position of the bin is drawn."""
    return LEFT + place * CELL


def draw_legend(sheet: Sheet) -> None:
    sheet.y += 4
    x = 16.0
    for fill, words in (
        (TEXT_FILL, "text of a sample"),
        (IMAGE_FILL, "image tokens (number: row of the gathered ones)"),
        ((PADDING,), "padding"),
        ((ABSENT,), "not held"),
    ):
        for colour in fill:
            sheet.box(x, 12, 12, colour, line=ABSENT_LINE if colour == ABSENT else "#ffffff")
            x += 14
        sheet.text(x + 4, words, dy=10, size=11, fill=FAINT)
        x += 20 + 5.6 * len(words)
    sheet.dot(x + 6, dy=6)
    sheet.text(x + 14, "place whose next token is learnt", dy=10, size=11, fill=FAINT)
    sheet.y += 30


def draw_bounds(sheet: Sheet, batch: MicroBatch) -> None:
    """Draw cu_seqlens as ticks over the cells."""
    sheet.text(16, "cu_seqlens", dy=10, size=11, fill=FAINT)
    for bound in batch.cu_seqlens.tolist():
        x = column(bound)
        sheet.text(x, str(bound), dy=10, size=11, anchor="middle")
        sheet.line(x, sheet.y + 13, x, sheet.y + 19)
    sheet.y += 22


def draw_tokens(
    sheet: Sheet, label: str, part: Part, places: np.ndarray, *, rows: bool = False, loss: bool = False
) -> None:
    """Draw a row of cells: the positions of the bin that a rank holds."""
    batch = part.batch
    ids = dict(zip(part.tokens.tolist(), batch.input_ids[0].tolist()))
    segments = np.searchsorted(batch.cu_seqlens.numpy(), places, side="right") - 1
    sheet.text(16, label, dy=13, size=11, fill=FAINT)
    for place in range(SEQ_LEN):
        sheet.box(column(place), CELL, CELL, ABSENT, line=ABSENT_LINE)
    for place, segment in zip(places.tolist(), segments.tolist()):
        fills = IMAGE_FILL if ids[place] == GEOMETRY.image_token_id else TEXT_FILL
        sheet.box(column(place), CELL, CELL, fills[segment] if ids[place] else PADDING)
    if rows:
        for place, row in zip(part.stream[batch.image_index.numpy()], batch.image_rows.tolist()):
            sheet.text(column(place) + CELL / 2, str(row), dy=13, size=11, fill="#ffffff", anchor="middle")
    if loss:
        for place in part.tokens[batch.loss_index.numpy()]:
            sheet.dot(column(place) + CELL / 2, dy=CELL / 2)
    sheet.y += CELL + 4


def draw_positions(sheet: Sheet, part: Part) -> None:
    """Draw the three rows of mrope positions of the tokens that a rank holds."""
    for axis, name in enumerate("thw"):
        sheet.text(16, f"position {name}", dy=12, size=11, fill=FAINT)
        for place, position in zip(part.tokens, part.batch.position_ids[axis].tolist()):
            sheet.text(column(place) + CELL / 2, str(position), dy=12, size=11, anchor="middle")
        sheet.y += 15
    sheet.y += 4


def owner_of(images: Sequence[TokenizedSample]) -> list[tuple[int, tuple[int, int]]]:
    """Return (sample, (rows, columns) of patches) for each image of a bin."""
    return [(n, (h, w)) for n, sample in enumerate(images) for _, h, w in sample.image_grid_thw.tolist()]


def draw_pixels(sheet: Sheet, part: Part, samples: Sequence[TokenizedSample]) -> None:
    """Draw the patches that a rank gets, image by image."""
    owners, x, merge = owner_of(samples), float(LEFT), GEOMETRY.spatial_merge_size
    sheet.text(16, "pixels", dy=PATCH + 2, size=11, fill=FAINT)
    if not part.images:
        sheet.text(LEFT, "none", dy=PATCH + 2, size=11)
        sheet.y += 2 * PATCH + 6
        return
    height = 0
    for image in part.images:
        sample, (rows, columns) = (0, (merge, merge)) if image is None else owners[image]
        fill = "#b8b8b8" if image is None else IMAGE_FILL[sample]
        for row, col in np.ndindex(rows, columns):
            gap_x, gap_y = col // merge * 2, row // merge * 2
            sheet.box(x + col * PATCH + gap_x, PATCH, PATCH, fill, dy=row * PATCH + gap_y)
        x += columns * PATCH + columns + 6
        words = f"image {image}: {rows} x {columns} patches, {rows * columns // merge**2} image tokens"
        words = "blank image: its token goes nowhere" if image is None else words
        sheet.text(x, words.replace(" 1 image tokens", " 1 image token"), dy=PATCH + 2, size=11)
        x += 6.1 * len(words)
        height = max(height, rows * PATCH + rows)
    sheet.y += max(height, 2 * PATCH) + 6


def draw_rows(
    sheet: Sheet, label: str, rows: Sequence[tuple[int, int] | None], samples: Sequence[TokenizedSample]
) -> None:
    """Draw a row of cells: image tokens by their rows."""
    owners = owner_of(samples)
    sheet.text(16, label, dy=13, size=11, fill=FAINT)
    for row, found in enumerate(rows):
        fill = "#ffffff" if found is None else IMAGE_FILL[owners[found[0]][0]]
        sheet.box(column(row), CELL, CELL, fill, line="#bdbdbd" if found is None else "#ffffff")
        ink = FAINT if found is None else "#ffffff"
        sheet.text(column(row) + CELL / 2, str(row), dy=13, size=11, fill=ink, anchor="middle")


def draw_source(sheet: Sheet, start: int, stop: int, part: Part) -> None:
    """Write under some rows the rank that they come from."""
    left, right = column(start) + 2, column(stop) - 2
    sheet.line(left, sheet.y + CELL + 4, right, sheet.y + CELL + 4)
    sheet.text((left + right) / 2, f"from {part.name}", dy=CELL + 17, size=11, anchor="middle")


def draw_joined(sheet: Sheet, parts: Sequence[Part], samples: Sequence[TokenizedSample]) -> None:
    """Draw the image tokens that the first pipeline rank gets from all ranks."""
    first = parts[0]
    rows = joined_images(parts, first)
    draw_rows(sheet, "on rank 0", rows, samples)
    rows_of_ranks = (first.batch.encoded_rows, *first.batch.arriving_rows)
    bounds = itertools.pairwise(itertools.accumulate(rows_of_ranks, initial=0))
    for rank, (start, stop) in zip(first.stages.ranks, bounds):
        draw_source(sheet, start, stop, parts[rank])
    words = "each one's gradient goes back to the rank that has encoded it"
    sheet.text(column(len(rows)) + 10, words, dy=13, size=11, fill=FAINT)
    sheet.y += CELL + 32


def draw_gathered(sheet: Sheet, parts: Sequence[Part], samples: Sequence[TokenizedSample]) -> None:
    """Draw the gathered image tokens, which are the same on every rank that shares the images."""
    group, rows = parts[0].encoders, gathered_images(parts, parts[0])
    draw_rows(sheet, "gathered on each", rows, samples)
    each = len(rows) // group.size()
    for number, rank in enumerate(group.ranks):
        draw_source(sheet, number * each, (number + 1) * each, parts[rank])
    users = parts[0].users
    words = "each rank has their whole gradient: none summed"
    if users.size() > 1:
        words = f"gradients summed over ranks {', '.join(map(str, users.ranks))}"
    sheet.text(column(len(rows)) + 10, words, dy=13, size=11, fill=FAINT)
    sheet.y += CELL + 32


def draw_rank(sheet: Sheet, part: Part, samples: Sequence[TokenizedSample], *, positions: bool) -> None:
    if part.name:
        sheet.y += 8
        sheet.text(16, f"rank {part.mesh.rank}: {part.name}", dy=10, bold=True)
        sheet.y += 18
    is_split = len(part.stream) < len(part.tokens)
    if is_split:
        draw_tokens(sheet, "attention, loss", part, part.tokens, loss=True)
        draw_tokens(sheet, "residual stream", part, part.stream, rows=True)
    else:
        label = "tokens" if part.embeds else "hidden states"
        draw_tokens(sheet, label, part, part.tokens, rows=part.embeds, loss=part.has_loss)
    if positions:
        draw_positions(sheet, part)
    draw_pixels(sheet, part, samples)


def draw_layers(sheet: Sheet, parts: Sequence[Part]) -> None:
    """Draw the pieces of the model, one lane per pipeline rank, in the order in which a micro batch passes them."""
    width, lane = 22, 44
    x0 = LEFT + 92.0
    pieces = sorted(
        ((chunk, rank) for rank, part in enumerate(parts) for chunk in part.chunks), key=lambda piece: piece[0][0]
    )
    sheet.y += 16
    for rank in range(len(parts)):
        sheet.text(16, f"rank {rank}: layers", dy=rank * lane + 15, size=11, fill=FAINT)
        for layer in range(QWEN_2B.language.num_layers):
            sheet.box(x0 + layer * width, width, 22, ABSENT, dy=rank * lane, line=ABSENT_LINE)
    for chunk, rank in pieces:
        for layer in chunk:
            sheet.box(x0 + layer * width, width, 22, "#e3d7f2", dy=rank * lane)
            is_deep = layer < len(QWEN_2B.vision.deepstack_layers)
            label = f"{layer}+" if is_deep else str(layer)
            sheet.text(x0 + layer * width + width / 2, label, dy=rank * lane + 15, size=11, anchor="middle")
    (_, first_rank), (last, last_rank) = pieces[0], pieces[-1]
    sheet.box(LEFT, 86, 22, "#e3d7f2", dy=first_rank * lane)
    sheet.text(LEFT + 43, "vision, embed", dy=first_rank * lane + 15, size=11, anchor="middle")
    for rank in parts[0].stages.ranks[1:]:
        sheet.box(LEFT, 86, 22, "#e3d7f2", dy=rank * lane)
        sheet.text(LEFT + 43, "vision, a copy", dy=rank * lane + 15, size=11, anchor="middle")
    end = x0 + (last[-1] + 1) * width + 6
    sheet.box(end, 86, 22, "#e3d7f2", dy=last_rank * lane)
    sheet.text(end + 43, "norm, loss", dy=last_rank * lane + 15, size=11, anchor="middle")
    for (chunk, rank), (_, after) in itertools.pairwise(pieces):
        x, below = x0 + (chunk[-1] + 1) * width, rank < after
        top, bottom = sheet.y + min(rank, after) * lane + 23, sheet.y + max(rank, after) * lane - 1
        sheet.line(x - 6, top if below else bottom, x + 6, bottom if below else top, arrow=True)
    sheet.y += lane * len(parts) + 4
    words = f"arrows: hidden states ({len(parts[0].stream)}, 1, D); their gradients go the other way"
    sheet.text(LEFT, f"{words}. +: image tokens get a deepstack feature after the layer", size=11, fill=FAINT)
    sheet.y += 16


def draw_dealt(sheet: Sheet, layout: Layout) -> None:
    costs, shares = deal_bins(layout.ranks)
    mean = sum(costs) / len(costs)
    for rank, share in enumerate(shares):
        name = parts_of(layout.parallel, layout.ranks, make_bin(0))[rank].name
        total = sum(costs[number] for number in share) / mean
        sheet.y += 8
        sheet.text(16, f"rank {rank}: {name}", dy=10, bold=True)
        sheet.text(LEFT, f"total cost {total:.2f}, in costs of the mean bin", dy=10, size=11, fill=FAINT)
        sheet.y += 18
        for number in share:
            part = parts_of(layout.parallel, layout.ranks, make_bin(number))[rank]
            label = f"bin {number}: cost {costs[number] / mean:.2f}"
            draw_tokens(sheet, label, part, part.tokens, rows=True, loss=True)


def draw(name: str) -> str:
    layout, samples = LAYOUTS[name], make_bin(0)
    sheet = Sheet(layout)
    draw_legend(sheet)
    parts = parts_of(layout.parallel, layout.ranks, samples)
    if parts[0].mesh.dp > 1:
        draw_dealt(sheet, layout)
    else:
        draw_bounds(sheet, parts[0].batch)
        for part in parts:
            draw_rank(sheet, part, samples, positions=layout.ranks == 1 or layout.parallel.cp == 2 == layout.ranks)
        if parts[0].encoders.size() > 1:
            sheet.y += 8
            draw_gathered(sheet, parts, samples)
        elif parts[0].stages.size() > 1:
            sheet.y += 8
            draw_joined(sheet, parts, samples)
        if layout.parallel.pp > 1:
            draw_layers(sheet, parts)
    sheet.y += 8
    return sheet.render()


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in LAYOUTS:
        (PICTURES / f"{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main()
