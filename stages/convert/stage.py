"""convert: raw rows -> sample shards. Every row that is left out is listed in quarantine.jsonl.

    train/shard-00000.tar ...  heldout/shard-00000.tar ...   samples with the original bytes of images and videos
    quarantine.jsonl                                         one record per line: key, reason, detail, file, row
    pictures.parquet                                         SHA-256 of every distinct image and video file, and its
                                                             first sample
    report.json  report.html

There are two passes over the source. The first decodes every image and video and keeps hashes (scan/, deleted at the
end); the second copies samples into shards. Both commit piece by piece, so that an interrupted run can be resumed. Only
the plan between them keeps data of every sample in memory, some hundred bytes (plan.py).
"""

from collections.abc import Mapping

from dataset_builders.storage.store import StorePath, make_dir, remove_tree
from dataset_builders.videos.decode import VideoLimits
from stages.convert.config import ConvertConfig
from stages.convert.plan import DUPLICATE, Draw, check_heldout, make_plan
from stages.convert.report import Converted, convert_stats, gather_figures, iter_left_out, write_convert_report
from stages.convert.rows import list_rows
from stages.convert.scan import ScanTask, scan_all, scan_path
from stages.convert.write import PICTURES, distinct_pictures, write_all, write_pictures, write_tasks
from stages.shared.artifacts.artifact import Input, Stage, StageOutput
from stages.shared.artifacts.left_out import QUARANTINE, check_lost, write_left_out
from stages.shared.artifacts.workers import StageResources

# 3: references of documents without the_cauldron's full stop; 4: min_heldout, running numbers with any number of digits
# 5: a key twice, the digits of float32; 6: what no option reads, placeholders, numbered marks
# 7: rows with a mask, weights of messages or an image that no option reads are left out of tables too
# 8: origins of the subsets; both spellings of documents among several sources too
# 9: boxes, those in texts too
VERSION = 10  # 10: videos, which left their rows out before

_ROWS_PER_WORKER = 2000  # rows that take about as long as the start of a process


def _run(config: ConvertConfig, inputs: Mapping[str, Input], work: StorePath, resources: StageResources) -> StageOutput:
    rows, chosen, source_rows = list_rows(config, inputs)
    num_rows = source_rows if config.max_rows is None else min(config.max_rows, source_rows)
    resources = resources.at_most(max(1, num_rows // _ROWS_PER_WORKER))
    make_dir(scan_path(work, 0).parent)
    limits = VideoLimits(
        max_pixels=config.max_image_pixels, min_side=config.min_image_side, max_frames=config.max_video_frames
    )
    scan_tasks = [
        ScanTask(
            part=part,
            rows=chosen[i],
            builder=rows.readers[i][0],
            options=rows.readers[i][1],
            limits=limits,
            decode=config.decode_check == "full",
            out=scan_path(work, i),
        )
        for i, part in rows.parts.items()
    ]
    scan = scan_all(scan_tasks, resources)
    own_splits = [part.split for part in rows.parts.values()]
    draw = Draw(seed=config.seed, heldout_fraction=config.heldout_fraction, min_heldout=config.min_heldout)
    plan = make_plan(scan, own_splits, draw, int(config.shard_size_mb * 1e6))
    num_left_out = write_left_out(work, iter_left_out(scan, plan, rows.parts))
    lost = {reason: number for reason, number in plan.skips().items() if reason != DUPLICATE}
    sources = " and ".join(str(inputs[role].dir) for role in config.readings)
    limit = ("convert.max_skip_fraction", config.max_skip_fraction)
    check_lost(lost, len(scan), limit, sources, str(work / QUARANTINE), iter_left_out(scan, plan, rows.parts))
    check_heldout(plan, own_splits, draw)
    num_kept = int(plan.kept.sum())
    shards = write_all(write_tasks(work, scan, plan, rows), num_kept, num_rows, resources)
    num_written = sum(shard.num_samples for shard in shards)
    counts = (num_written, num_kept, num_left_out, len(scan))
    assert num_written == num_kept and num_written + num_left_out == len(scan), counts
    converted = Converted(
        source_rows=source_rows,
        num_rows=num_rows,
        scan=scan,
        plan=plan,
        figures=gather_figures(work, scan, plan, rows.parts),
        pictures=distinct_pictures(scan, plan),
        parts=rows.parts,
        origins=rows.origins(),
        not_read=rows.not_read(),
    )
    write_pictures(work / PICTURES, converted.pictures, scan, plan)
    stats = convert_stats(converted)
    write_convert_report(work, converted, stats)
    remove_tree(scan_path(work, 0).parent)
    return StageOutput(shards=shards, skips=plan.skips(), stats=stats)


STAGE = Stage(
    "convert",
    VERSION,
    _run,
    dataset="samples",
    digested=(PICTURES, QUARANTINE),
    contents="stages.shared.preview.render:stage_contents",
)
