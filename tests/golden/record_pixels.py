"""Record the reference's pixels of the test images: tests/golden/pixels.json.

Needs torchvision, see tests/helpers/torchvision_reference.py:

    PYTHONPATH=DIR python -m tests.golden.record_pixels

Run this only after a change of the images or of the reference's version, and never to make a failing test pass.
"""

from importlib.metadata import version
from pathlib import Path

from dataset_builders.storage.files import write_json
from tests.helpers.pixels import pixel_cases, reference_digest
from tests.helpers.torchvision_reference import reference_pixels, torchvision_version

PIXELS_JSON = Path(__file__).with_name("pixels.json")


def main() -> None:
    torchvision = torchvision_version()
    if torchvision is None:
        raise SystemExit("torchvision cannot be imported; see tests/helpers/torchvision_reference.py")
    digests = {case.name: reference_digest(*reference_pixels(case.data, case.config)) for case in pixel_cases()}
    made_with = {"torchvision": torchvision, **{name: version(name) for name in ("transformers", "torch", "pillow")}}
    write_json(PIXELS_JSON, {"made_with": made_with, "digests": digests})
    print(f"{len(digests)} digests in {PIXELS_JSON}")


if __name__ == "__main__":
    main()
