"""The rewrite program on files that do not have its forms: one line, and the file as it was."""

import sys

import pytest

from dataset_builders.recognise import rewrite

FILES = {
    "nothing.json": None,
    "bad.json": "{bad",
    "list.json": '[{"question": "q"}]',
    "object.jsonl": '{"a": 1}\n',
    "no.tar": "no tar",
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *[("nothing.json", "list"), ("bad.json", "list"), ("list.json", "keys"), ("list.json", "pairs")],
        *[("list.json", "header"), ("list.json", "trl"), ("object.jsonl", "list"), ("no.tar", "tar_names")],
    ],
)
def test_a_file_without_the_form_stays_and_is_named(name, form, tmp_path, monkeypatch, capsys):
    path = tmp_path / name
    if FILES[name] is not None:
        path.write_text(FILES[name])
    monkeypatch.setattr(sys, "argv", ["rewrite", form, str(path)])
    assert rewrite.main() == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and name in err and form in err
    assert (path.read_text() if path.exists() else None) == FILES[name] and not list(tmp_path.glob("*.old"))


def test_the_oldest_file_is_not_written_over(tmp_path, monkeypatch, capsys):
    path, old = tmp_path / "rows.json", tmp_path / "rows.json.old"
    path.write_text('{"rows": [{"a": 1}]}')
    old.write_text("older")
    monkeypatch.setattr(sys, "argv", ["rewrite", "list", str(path)])
    assert rewrite.main() == 2 and "rows.json.old is there already" in capsys.readouterr().err
    assert old.read_text() == "older" and path.exists()
