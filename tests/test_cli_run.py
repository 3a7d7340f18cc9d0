"""`specgen run` by its arguments: what the session is asked, what comes out, what bad input gets."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_session import PROMPT, FakeSession, Script, install
from gguf_files import llama_file
from typer.testing import CliRunner, Result

from specgen.cli import prompt as prompt_module
from specgen.cli.app import app
from specgen.cli.console import Console, printable
from specgen.cli.outfile import OutFile
from specgen.cli.prompt import PromptSource, read_prompt
from specgen.cli.run import unescaped
from specgen.errors import SpecgenError, UsageError
from specgen.options import SamplingOptions

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's config.toml; there is none until a test writes it."""
    folder = tmp_path / "config"
    folder.mkdir()
    monkeypatch.setenv("SPECGEN_CONFIG", str(folder))
    return folder / "config.toml"


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    return install(Script(), lambda name, module: monkeypatch.setitem(sys.modules, name, module))


@pytest.fixture
def run(session: FakeSession) -> Run:
    def invoke(*arguments: str, stdin: str | bytes | None = "") -> Result:
        return CliRunner().invoke(app, ["run", *arguments], input=stdin)

    return invoke


def options_of(session: FakeSession) -> dict[str, object]:
    return next(call for call in session.calls if "options" in call)


# What the session is asked.


def test_the_answer_is_all_of_stdout(run: Run) -> None:
    result = run("-p", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello big world", "")


def test_every_flag_reaches_the_session(run: Run, session: FakeSession) -> None:
    line = (
        "-t 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty 0.2 "
        "--frequency-penalty 0.3 --logit-bias 3=-inf --logit-bias 4=1.5 --seed 9 -n 7 --ignore-eos --proposer none "
        "--gamma 3 --accept rejection --ctx 64 --weight-cache 5MB --threads 2 --device cpu --kv f32 --system S --raw "
        "--quant int8 --tree 2 --draft-stop 0.3 --draft small --draft-quant int4 --max-memory 2GB --ngram-store "
        "--no-graphs"
    )
    assert run("-p", "hi", "--stop", r"a\n", "--stop", r"\d\\n", *line.split()).exit_code == 0
    assert {"text": "hi", "system": "S", "raw": True} in session.calls
    loaded = {"device": "cpu", "threads": 2, "context_tokens": 64, "kv": "f32"}
    loaded |= {
        "quant": "int8",
        "draft_quant": "int4",
        "max_memory_bytes": 2_000_000_000,
        "ngram_store": True,
        "weight_cache_bytes": 5_000_000,
        "graphs": False,
    }
    assert {"load": loaded, "ref": "fake", "draft": "small"} in session.calls
    options = options_of(session)["options"]
    assert options.sampling == SamplingOptions(0.7, 5, 0.9, 0.1, 1.1, 0.2, 0.3, ((3, -float("inf")), (4, 1.5)), 9)
    assert (options.max_tokens, options.stop, options.ignore_eos) == (7, ("a\n", r"\d" + r"\n"), True)
    assert (options.proposer, options.gamma, options.accept) == ("none", 3, "rejection")
    assert (options.tree, options.draft.stop_below) == (2, 0.3)


def test_the_defaults_are_reproducible_and_exact(run: Run, session: FakeSession) -> None:
    run("-p", "hi")
    options = options_of(session)["options"]
    assert options.sampling == SamplingOptions(temperature=0.0, seed=0)
    assert (options.max_tokens, options.gamma, options.proposer, options.accept) == (None, None, "auto", "coupled")


def test_flags_are_laid_over_the_models_own_sampling(run: Run, session: FakeSession) -> None:
    run("-p", "hi", "-m", "warm", "--top-k", "0")
    sampling = options_of(session)["options"].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 0)


def test_the_users_config_gives_the_defaults_of_flags(run: Run, session: FakeSession, config_file: Path) -> None:
    config_file.write_text('gamma = 3\nthreads = 1\nmodel = "mine"\nquiet = true\n')
    session.script.notices = ("a notice",)
    assert run("-p", "hi", "--threads", "2").stderr == ""
    assert options_of(session)["options"].gamma == 3
    assert session.calls[0]["load"]["threads"] == 2
    assert session.calls[0]["ref"] == "mine"
    assert run("-p", "hi", "--no-quiet").stderr == "note: a notice\n"
    config_file.write_text("gama = 3\n")
    refused(run("-p", "hi"), 2, "unknown key 'gama'", "did you mean 'gamma'?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(r"\n", "\n"), (r"\\n", r"\n"), (r"\t|", "\t|"), (r"\x41\u00e9", "Aé"), (r"\d\x4", r"\d\x4"), ("\\", "\\")],
)
def test_escapes_of_stop_strings(text: str, expected: str) -> None:
    assert unescaped(text) == expected


# Where the prompt comes from.


def test_stdin_alone_is_the_prompt(run: Run, session: FakeSession) -> None:
    run(stdin="from stdin\n")
    assert session.prompt == "from stdin"


def test_stdin_follows_the_prompt_after_a_blank_line(run: Run, session: FakeSession) -> None:
    run("-p", "Write a commit message", stdin="diff\n line\n")
    assert session.prompt == "Write a commit message\n\ndiff\n line"


def test_dash_reads_stdin(run: Run, session: FakeSession) -> None:
    run("-", "-p", "Say", stdin="it\n\n")
    assert session.prompt == "Say\n\nit\n"


def test_a_file_is_the_prompt_and_stdin_is_left_alone(run: Run, session: FakeSession, tmp_path: Path) -> None:
    file = tmp_path / "q.txt"
    file.write_bytes("\ufeffÜber was?\r\n".encode())
    run(str(file), stdin="unread")
    assert session.prompt == "Über was?"
    run(str(file), "-p", "Translate:")
    assert session.prompt == "Translate:\n\nÜber was?"


def test_raw_keeps_white_space(run: Run, session: FakeSession) -> None:
    assert run("-p", " ", "--raw").exit_code == 0
    assert session.prompt == " "


@pytest.fixture
def notes() -> list[str]:
    return []


def test_a_silent_pipe_beside_p_is_given_up(monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    monkeypatch.setattr(prompt_module, "INPUT_WAIT_S", 0.05)
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as stdin:
        assert read_prompt(PromptSource(None, "hi"), stdin, notes.append) == "hi"
    os.close(writer)
    assert "answering -p alone" in notes[-1]


def test_a_pipe_beside_p_is_read_to_its_end(notes: list[str]) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"data")
    os.close(writer)
    with open(reader, encoding="utf-8") as stdin:
        assert read_prompt(PromptSource(None, "hi"), stdin, notes.append) == "hi\n\ndata"
    assert notes == []


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_beside_p_is_not_read(device: str, notes: list[str]) -> None:
    with open(device, encoding="utf-8") as stdin:
        assert read_prompt(PromptSource(None, "hi"), stdin, notes.append) == "hi"


def test_a_terminal_is_not_read_unless_asked(notes: list[str]) -> None:
    _, slave = os.openpty()
    with open(slave, encoding="utf-8") as stdin:
        assert read_prompt(PromptSource(None, "hi"), stdin, notes.append) == "hi"
        with pytest.raises(UsageError, match="no prompt"):
            read_prompt(PromptSource(None, None), stdin, notes.append)


def test_endless_input_is_refused(monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    monkeypatch.setattr(prompt_module, "MAX_PROMPT_BYTES", 1 << 20)
    with pytest.raises(UsageError, match="more than 1 MiB"):
        read_prompt(PromptSource("/dev/zero", None), None, notes.append)


# What bad input gets.


def refused(result: Result, code: int, message: str, hint: str | None = None) -> None:
    assert result.exit_code == code
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert "Traceback" not in result.stderr
    assert len(lines) <= 2
    if hint is None:
        assert all(line.startswith("hint: ") for line in lines[1:])
    else:
        assert lines[1].startswith("hint: ")
        assert hint in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["-t", "-1"], "temperature is -1", "at least 0"),
        (["-t", "nan"], "temperature is nan", "at least 0"),
        (["--top-p", "1.5"], "top-p is 1.5", "at most 1"),
        (["--top-p", "0"], "top-p is 0", "above 0"),
        (["--min-p", "2"], "min-p is 2", "at most 1"),
        (["--top-k", "-1"], "top-k is -1", "at least 0"),
        (["--repetition-penalty", "0"], "repetition penalty is 0", "above 0"),
        (["--seed", "-1"], "seed is -1", "at least 0"),
        (["-n", "0"], "max tokens is 0", "at least 1"),
        (["--gamma", "99"], "gamma is 99", "at most 16"),
        (["--gamma", "few"], "--gamma is 'few'", "whole number or auto"),
        (["--proposer", "ngrm"], "proposer is 'ngrm'", "ngram"),
        (["--proposer", "model"], "--proposer model needs a draft model", "--draft NAME|PATH"),
        (["--proposer", "mix", "--draft", "none"], "--proposer mix needs a draft model", "--draft NAME|PATH"),
        (["--tree", "9"], "tree is 9", "at most 8"),
        (["--draft-stop", "0.5"], "--draft-stop needs a draft model", "--draft NAME|PATH"),
        (["--draft-quant", "int4"], "--draft-quant needs a draft model", "--draft NAME|PATH"),
        (["--draft-stop", "2"], "draft stop is 2", "at most 1"),
        (["--draft-quant", "int3"], "draft quantisation is 'int3'", "int4"),
        (["--max-memory", "lots"], "--max-memory is 'lots'", "6GB"),
        (["--accept", "typcal"], "acceptance rule is 'typcal'", "typical"),
        (["--kv", "f8"], "kv is 'f8'", "f32"),
        (["--ctx", "1"], "context is 1", "at least 8"),
        (["--threads", "0"], "threads is 0", "at least 1"),
        (["--color", "blue"], "--color is 'blue'", "auto, always, never"),
        (["--logit-bias", "x"], "--logit-bias 'x'", "123=-2.5"),
        (["--logit-bias", "1=nan"], "logit bias of token 1", "number"),
        (["--stop", ""], "stop string is empty", None),
        (["-n", "many"], "'--max-tokens'", "specgen run --help"),
        (["--temprature", "1"], "--temprature", "specgen run --help"),
        (["-o", "/nowhere/x"], "no directory /nowhere", "create it"),
        (["-o", "/"], "it is a directory", "name of a file"),
    ],
)
def test_bad_options_are_refused_before_loading(
    run: Run, session: FakeSession, arguments: list[str], message: str, hint: str | None
) -> None:
    refused(run("-p", "hi", *arguments), 2, message, hint)
    assert session.calls == []


def test_how_a_draft_is_used_may_stand_where_a_model_has_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_DRAFT_STOP", "0.5")
    monkeypatch.setenv("SPECGEN_DRAFT_QUANT", "int4")
    assert run("-p", "hi").exit_code == 0
    refused(run("-p", "hi", "--draft-stop", "0.5"), 2, "--draft-stop needs a draft model", "--draft NAME|PATH")


def test_bad_prompts_are_refused_before_loading(run: Run, session: FakeSession, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    refused(run("no such file.txt"), 2, "No such file", "-p 'no such file.txt'")
    refused(run(str(tmp_path)), 2, "Is a directory", "inside it")
    refused(run(str(latin)), 2, "byte 0xe9 at offset 3", "iconv")
    refused(run(stdin=b"ab\xffc"), 2, "standard input is not valid UTF-8: byte 0xff at offset 2", "iconv")
    refused(run(stdin=b"ab\xe6\xbc"), 2, "byte 0xe6 at offset 2", "iconv")
    refused(run("-p", "bad \udcff", stdin=""), 2, "-p is not valid UTF-8: byte 0xff at offset 4", "iconv")
    refused(run("-p", " \n"), 2, "the prompt is empty", "specgen run -p")
    refused(run(stdin="\n\n"), 2, "the prompt is empty", "specgen run -p")
    assert session.calls == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_prompt_file_is_named(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("x")
    secret.chmod(0)
    refused(run(str(secret)), 2, "Permission denied")


def test_an_unknown_model_has_its_own_exit_code(run: Run) -> None:
    refused(run("-p", "x", "-m", "unknown"), 3, "unknown model", "did you mean 'fake'?")


@pytest.mark.parametrize(
    ("fail", "code", "message"),
    [("context", 5, "the context is full"), ("memory", 4, "memory ran out"), ("bug", 1, "internal error: KeyError")],
)
def test_failures_in_the_middle(run: Run, session: FakeSession, fail: str, code: int, message: str) -> None:
    session.script.fail = fail
    result = run("-p", "x")
    assert result.exit_code == code
    assert result.stdout == "Hello", "what was said stays"
    assert result.stderr.splitlines()[0].startswith(f"error: {message}")
    assert "Traceback" not in result.stderr
    assert session.closed
    assert "Traceback" in run("-p", "x", "--debug").stderr
    assert "Traceback" in CliRunner().invoke(app, ["--debug", "run", "-p", "x"]).stderr


def test_a_message_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\nb\udcff\x9b é") == "a\\x1b[2J\\nb\\udcff\\x9b é"


# What comes out.


def test_json_is_one_object_with_everything(run: Run) -> None:
    result = run("-p", "hi", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert report["text"] == "Hello big world"
    assert report["token_ids"] == [0, 1, 2]
    assert (report["finish_reason"], report["schema_version"]) == ("eos", 1)
    assert (report["prompt_tokens"], report["completion_tokens"]) == (2, 3)
    assert report["timings"] == {
        "load_s": 0.5, "prefill_ms": 10.0, "ttft_ms": 12.0, "decode_ms": 20.0,
        "prefill_tok_s": 100.0, "decode_tok_s": 100.0, "itl_p50_ms": 20.0, "itl_p95_ms": 20.0,
    }  # fmt: skip
    speculation = report["speculation"]
    assert (speculation["proposer"], speculation["accept"], speculation["lossless"]) == ("ngram", "coupled", True)
    assert (speculation["gamma"], speculation["cycles"]) == ("auto", 2)
    assert (speculation["proposed"], speculation["accepted"]) == (2, 1)
    assert (speculation["yield"], speculation["survival"]) == (1.5, [1.0, 0.0])
    assert speculation["fallback"] == {"no match": 1}
    assert report["memory"]["weights_bytes"] == 1000
    assert report["versions"] == {"specgen": "0"}
    assert report["sampling"]["seed"] == 0


def test_json_of_a_single_token_has_null_rates(run: Run, session: FakeSession) -> None:
    session.script.cycles = ((("Hi", False),),)
    timings = json.loads(run("-p", "hi", "--json").stdout)["timings"]
    assert timings["decode_tok_s"] is None
    assert timings["itl_p50_ms"] is None


def test_gamma_is_a_number_in_json_when_it_was_one(run: Run) -> None:
    assert json.loads(run("-p", "hi", "--json", "--gamma", "3").stdout)["speculation"]["gamma"] == 3


def test_stats_and_notes_go_to_stderr(run: Run, session: FakeSession) -> None:
    session.script.notices = ("two BOS tokens",)
    result = run("-p", "hi", "--stats")
    assert result.stdout == "Hello big world"
    assert result.stderr.startswith("note: two BOS tokens\n")
    for word in ("ttft_ms", "Speculation", "yield", "s_1", "no match", "weights_bytes"):
        assert word in result.stderr
    assert run("-p", "hi", "--quiet").stderr == ""


def test_an_answer_cut_by_the_context_has_its_own_exit_code(run: Run, session: FakeSession) -> None:
    session.script.reason = "context"
    result = run("-p", "hi", "-q")
    assert (result.exit_code, result.stdout) == (5, "Hello big world")
    assert result.stderr.startswith("warning: the context is full")


def test_always_colours_a_pipe_and_never_lets_the_model_do_it(run: Run, session: FakeSession) -> None:
    session.script.cycles = ((("a\x1b[2J", True),),)
    out = run("-p", "hi", "--color", "always").stdout
    assert out.startswith("\x1b[4;36ma")
    assert "\x1b[2J" not in out


@pytest.mark.parametrize(
    ("environ", "color", "expected"),
    [
        ({"TERM": "xterm"}, "auto", True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "auto", False),
        ({"TERM": "xterm", "NO_COLOR": ""}, "auto", True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "always", True),
        ({"TERM": "xterm"}, "never", False),
        ({"TERM": "dumb"}, "auto", False),
        ({}, "auto", False),
    ],
)
def test_when_a_terminal_is_coloured(environ: dict[str, str], color: str, expected: bool) -> None:
    _, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as terminal:
        console = Console(None, terminal, terminal, environ=environ, color=color)  # type: ignore[arg-type]
        assert console.can_color(terminal) is expected
        assert console.same_screen


# -o FILE.


def test_o_writes_the_answer_and_nothing_to_stdout(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "out.txt"
    file.write_text("old")
    file.chmod(0o640)
    result = run("-p", "hi", "-o", str(file))
    assert (result.exit_code, result.stdout) == (0, "")
    assert file.read_bytes() == b"Hello big world"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(folder) == ["out.txt"], "no temporary file stays"
    run("-p", "hi", "--json", "-o", str(file))
    assert json.loads(file.read_text())["text"] == "Hello big world"
    assert run("-p", "hi", "-o", "-").stdout == "Hello big world"


def test_o_keeps_the_old_file_when_the_answer_fails(run: Run, session: FakeSession, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / "out.txt"
    file.write_text("old")
    session.script.fail = "bug"
    assert run("-p", "hi", "-o", str(file)).exit_code == 1
    assert file.read_text() == "old"
    assert os.listdir(folder) == ["out.txt"]


def test_o_follows_links_and_does_not_replace_devices(tmp_path: Path) -> None:
    target, link = tmp_path / "real.txt", tmp_path / "link.txt"
    link.symlink_to(target)
    OutFile(str(link)).write(b"x")
    assert link.is_symlink()
    assert target.read_bytes() == b"x"
    OutFile(os.devnull).write(b"x")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_o_tells_when_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    file = OutFile(str(tmp_path / "out.txt"))
    monkeypatch.setattr(os, "fsync", full)
    before = os.listdir(tmp_path)
    with pytest.raises(SpecgenError, match="No space left"):
        file.write(b"x")
    assert os.listdir(tmp_path) == before


# Help.


def test_help_has_examples_and_exit_codes() -> None:
    result = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert result.stdout.index('specgen run -p "Why') < result.stdout.index("--temperature")
    for code in ("2 usage", "3 model or weights", "4 memory", "5 context full", "130 interrupted"):
        assert code in " ".join(result.stdout.split())


def test_version_and_unknown_commands() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("specgen ")
    refused(CliRunner().invoke(app, ["rum"]), 2, "No such command 'rum'", "specgen --help")
    assert CliRunner().invoke(app, []).exit_code == 2


def test_the_prompt_is_said_back_unchanged(run: Run, session: FakeSession) -> None:
    session.script.cycles = (((PROMPT, False),),)
    assert run("-p", "[bold]é漢😀[/]").stdout == "[bold]é漢😀[/]"


# With a real model: a random Llama of one layer in a GGUF file.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_file(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def ask(model: Path) -> Run:
    def invoke(*arguments: str, path: Path = model) -> Result:
        return CliRunner().invoke(app, ["run", "-m", str(path), "--device", "cpu", *arguments], input="")

    return invoke


def test_a_real_answer_is_the_same_however_it_is_speculated(ask: Run) -> None:
    common = ("-p", "hello world hello world", "-n", "40", "-t", "0.8", "--seed", "5", "--ignore-eos")
    report = json.loads(ask(*common, "--proposer", "none", "--json").stdout)
    assert report["completion_tokens"] == len(report["token_ids"]) == 40
    assert report["finish_reason"] == "length"
    assert report["speculation"]["proposed"] == 0
    assert report["timings"]["load_s"] > 0
    assert report["memory"]["kv_tokens"] >= 40
    for gamma in ("1", "4", "auto"):
        drafted = json.loads(ask(*common, "--gamma", gamma, "--json").stdout)
        assert drafted["token_ids"] == report["token_ids"]
    piped = ask(*common)
    assert piped.stdout_bytes == report["text"].encode()
    assert piped.stderr == ""
    other = json.loads(ask(*common, "--seed", "6", "--json").stdout)
    assert other["token_ids"] != report["token_ids"], "the seed matters"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "a" * 500], 5, "the prompt has "),
        (["-p", "x", "--logit-bias", "999=1"], 2, "logit bias names token 999"),
        (["-p", "x", "--ctx", "99999"], 2, "--ctx is 99999"),
        (["-p", "x", "--raw", "--system", "s"], 2, "--system needs a chat template"),
    ],
)
def test_what_a_real_model_refuses(ask: Run, arguments: list[str], code: int, message: str) -> None:
    refused(ask(*arguments), code, message)


def test_a_truncated_model_is_named(ask: Run, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:-1000])
    refused(ask("-p", "x", path=broken), 3, "broken.gguf")
    refused(ask("-p", "x", path=tmp_path / "none.gguf"), 3, "none.gguf")


def test_an_answer_that_fills_the_context(ask: Run) -> None:
    result = ask("-p", "x", "--ctx", "32", "--ignore-eos", "--json")
    assert result.exit_code == 5
    assert json.loads(result.stdout)["finish_reason"] == "context"
    assert result.stderr == "warning: the context is full: the answer ends at 32 tokens\n"
