"""What holds for every subcommand: its help is quick and its examples run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from scripts import GENERATE, TRAIN

from attn_ext.profile import VARIANTS, Case, Trace, cli
from attn_ext.profile.commands import COMMANDS

#: Added to every example that takes these options: the last one given counts.
TINY = {"--device": "cpu", "--batch": "1", "--heads": "2", "--kv-heads": "1", "--seq": "16",
        "--head-dim": "8", "--dtype": "fp32", "--steps": "2", "--warmup": "1"}  # fmt: skip


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def examples() -> list[str]:
    return [
        example
        for command in subparsers().values()
        for example in re.findall(r"^  attn-ext (.+)$", command.epilog or "", re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `attn-ext run` has run, with traces under the names of its default."""
    folder = tmp_path_factory.mktemp("examples")
    options = [text for pair in TINY.items() for text in pair]
    assert cli.main(["run", *options, "--kv-heads", "2", "--out", str(folder / "profile")]) == 0
    for variant in VARIANTS:
        trace = folder / "profile" / f"1_2_16_8_{variant}_eager.json.gz"
        if trace.exists():
            shutil.copy(trace, folder / "profile" / f"{Case().tag(variant)}.json.gz")
    for name, script in (("train", TRAIN), ("generate", GENERATE)):
        (folder / f"{name}.py").write_text(script)
    return folder


@pytest.mark.parametrize("example", examples())
def test_the_examples_of_the_help_run(
    example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    command, *rest = shlex.split(example)
    takes = subparsers()[command]._option_string_actions
    small = TINY | {"--port": "0"} | ({"--seq": "8,16,32"} if command == "sweep" else {})
    tiny = [text for pair in small.items() if pair[0] in takes for text in pair]
    end = rest.index("--") if "--" in rest else len(rest)
    arguments = [command, *rest[:end], *tiny, *rest[end:]]
    monkeypatch.setattr("webbrowser.open", lambda address: None)
    monkeypatch.setattr("attn_ext.profile.viewer.Viewer.serve_forever", lambda viewer: None)
    assert cli.main(arguments) == 0, arguments
    assert capsys.readouterr().out
    if command == "exec":
        row = json.loads((folder / "profile" / "summary.json").read_text())["rows"][-1]
        trace = Trace.load(folder / "profile" / row["trace"])
        ops = [op.name for op in trace.steps[0].operators]
        assert ops.count("aten::scaled_dot_product_attention") == 1, "a step is a step"
        swap = "aten" if "--activate" in arguments else None
        assert trace.metadata["attn_ext"]["swap"] == swap


def test_every_command_has_an_example() -> None:
    assert list(subparsers()) == list(COMMANDS)
    assert {example.split()[0] for example in examples()} == set(COMMANDS)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_does_not_wait_for_torch(command: str, run_python) -> None:
    code = (
        "import runpy, subprocess, sys; sys.exit(subprocess.run([sys.executable, '-X', "
        f"'importtime', '-m', 'attn_ext.profile', *'{command}'.split(), '--help']).returncode)"
    )
    result = run_python(code)
    assert result.returncode == 0 and result.stdout.startswith("usage: attn-ext")
    assert "attn_ext.profile" in result.stderr
    assert not re.search(r"\| +(torch|matplotlib|jinja2|rich)$", result.stderr, re.MULTILINE)


def test_the_command_has_the_ops_where_it_asks_for_them(run_python) -> None:
    """In the command `import attn_ext` waits for its first use; elsewhere it loads everything."""
    code = (
        "import sys{}; import attn_ext; "
        "print('torch' in sys.modules, attn_ext.ops.softmax, callable(attn_ext.use))"
    )
    for setting, loaded in (("", True), ("; sys.argv = ['/usr/bin/attn-ext']", False)):
        result = run_python(code.format(setting))
        assert result.stdout.strip() == f"{loaded} attn_ext.softmax True", result.stderr
    result = run_python("import sys; sys.argv = ['attn-ext']; from attn_ext import sdpa, nothing")
    assert "cannot import name 'nothing'" in result.stderr


def test_a_reader_that_has_enough_is_no_error(run_python) -> None:
    """As in `attn-ext ncu flash | true`."""
    code = (
        "import subprocess, sys; "
        "command = [sys.executable, '-m', 'attn_ext.profile', 'ncu', 'flash']; "
        "child = subprocess.Popen(command, stdout=subprocess.PIPE); child.stdout.close(); "
        "sys.exit(child.wait())"
    )
    result = run_python(code)
    assert (result.returncode, result.stderr) == (1, "")


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2 and "COMMAND" in capsys.readouterr().err
