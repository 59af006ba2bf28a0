"""The header of a benchmark's result: the installed versions, and which of them differ from the pinned ones."""

from tests.bench import host


def test_the_header_of_a_bench_says_which_version_is_not_the_pinned_one(monkeypatch):
    version = host.importlib.metadata.version("torch").partition("+")[0]
    for pin, ending in ((version, ""), ("1.0", " (not the pinned 1.0)")):
        monkeypatch.setattr(host, "read_pins", lambda path, pin=pin: {"torch": f"torch=={pin}"})
        monkeypatch.setattr(host.torch.cuda, "is_available", lambda: False)
        text = next(text for text in host.describe()[1].split(", ") if text.startswith("torch "))
        assert text.startswith(f"torch {version}") and text.endswith(ending) and ("pinned" in text) == bool(ending)
    monkeypatch.setattr(host.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "merged_pins", lambda: {"torch": "torch==2.0"})
    assert host.version_text("torch").endswith("(not the pinned 2.0)")
