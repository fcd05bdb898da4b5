"""``megascale train data.text=FILE``: two real ranks on a small text, refusals by name, and runs from before there was such a key."""

from lightning_megascale.cli import resume
from tests.cli.run_megascale import TINY, megascale
from tests.cli.test_train import options


def test_train_on_a_text_then_edited_then_missing(tmp_path):
    cache = {"MEGASCALE_CACHE": str(tmp_path / "cache")}
    lines = [
        f"line {number}: the {word} is {number % 7} metres long, and so it stays" for number in range(120) for word in ("rope", "road")
    ]
    (tmp_path / "my.txt").write_text("\n".join(lines))
    done = megascale("train", *TINY, "data.text=my.txt", cwd=tmp_path, **cache)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert "step 4/4" in done.stdout and "the model writes:" in done.stdout
    assert [path.name[:9] for path in (tmp_path / "cache").iterdir() if path.is_dir()] == ["own-text-"]

    (tmp_path / "my.txt").write_text("\n".join(lines[1:]))
    longer = [argument.replace("max_steps=4", "max_steps=6") for argument in TINY]
    done = megascale("train", *longer, "data.text=my.txt", cwd=tmp_path, **cache)
    assert done.returncode == 2 and done.stderr.count("text=my.txt is not the text of the checkpoint") == 1, done.stderr

    done = megascale("train", *TINY, "data.text=mi.txt", "run.name=other", cwd=tmp_path, **cache)
    assert done.returncode == 2 and done.stderr.startswith("megascale: data.text='") and "mi.txt' does not exist" in done.stderr
    assert "'my.txt'" in done.stderr and done.stdout == ""  # no rank was started


def test_runs_from_before_there_was_such_a_key_go_on(tmp_path):
    old, new = options(tmp_path), options(tmp_path, data__text=None)
    assert resume.fingerprint(old) == resume.fingerprint(new) != resume.fingerprint(options(tmp_path, data__text="my.txt"))
