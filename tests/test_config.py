"""Standing choices: the layers, and what each refuses."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from specgen.config import Settings, flag_defaults, resolve_settings, standing_choices
from specgen.errors import SpecgenError, UsageError
from specgen.paths import cache_dir, config_dir, data_dir, ensure_dir


@pytest.fixture(autouse=True)
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECGEN_CONFIG", str(tmp_path))
    return tmp_path / "config.toml"


def test_without_anything_the_defaults_hold() -> None:
    assert resolve_settings(environ={}) == Settings()


def test_each_layer_wins_over_the_one_before(config_file: Path) -> None:
    config_file.write_text('threads = 1\nctx = 100\nkv = "int8"\nmodel = "a"\n')
    environ = {"SPECGEN_CTX": "200", "SPECGEN_KV": "bf16", "SPECGEN_MODEL": "12", "SPECGEN_GAMMA": ""}
    settings = resolve_settings({"kv": "f32", "model": None}, environ)
    assert settings == Settings(threads=1, ctx=200, kv="f32", model="12")
    assert standing_choices(environ) == {"threads": 1, "ctx": 200, "kv": "bf16", "model": "12"}


def test_auto_is_said_in_words_and_paths_are_relative_to_the_file(config_file: Path) -> None:
    config_file.write_text('gamma = "auto"\nmodels = "mine.toml"\nquiet = true\n')
    settings = resolve_settings(environ={})
    assert settings == Settings(models=config_file.parent / "mine.toml", quiet=True)
    assert resolve_settings(environ={"SPECGEN_QUIET": "false", "SPECGEN_GAMMA": "3"}) == Settings(
        models=config_file.parent / "mine.toml", gamma=3
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("thread = 3", "unknown key 'thread'", "'threads'"),
        ("zzz = 3", "unknown key 'zzz'", "known keys: accept, color"),
        ("threads = 0", "threads: threads is 0", "at least 1"),
        ("threads = true", "threads is True", "whole number"),
        ("threads = 1.5", "threads is 1.5", "whole number"),
        ("model = 3", "model is 3", "text"),
        ("quiet = 1", "quiet is 1", "true or false"),
        ('kv = "fp16"', "kv is 'fp16'", "'bf16'"),
        ('color = "blue"', "color is 'blue'", "auto, always, never"),
        ("gamma = 99", "gamma is 99", "at most 16"),
        ("[model]", "model is {}", "text"),
        ("=", "cannot read", ""),
    ],
)
def test_a_bad_file_is_refused(config_file: Path, text: str, message: str, hint: str) -> None:
    config_file.write_text(text)
    with pytest.raises(UsageError) as caught:
        resolve_settings(environ={})
    assert str(config_file) in caught.value.message
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("variable", "value", "message", "hint"),
    [
        ("SPECGEN_THREAD", "3", "unknown variable SPECGEN_THREAD", "SPECGEN_THREADS"),
        ("SPECGEN_CASHE", "x", "unknown variable SPECGEN_CASHE", "SPECGEN_CACHE"),
        ("SPECGEN_CTX", "many", "SPECGEN_CTX is 'many'", "whole number"),
        ("SPECGEN_KV", "f16", "SPECGEN_KV: kv is 'f16'", "'bf16'"),
        ("SPECGEN_QUIET", "yes", "SPECGEN_QUIET is 'yes'", "true or false"),
    ],
)
def test_a_bad_variable_is_refused(variable: str, value: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_settings(environ={variable: value})
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_variables_of_others_are_left_alone() -> None:
    environ = {"SPECGEN_TEST_SMOLLM2": "/x", "SPECGEN_CACHE": "/y", "SPECGENX": "1", "PATH": "/bin"}
    assert resolve_settings(environ=environ) == Settings()


def test_flag_defaults_are_what_a_command_line_takes() -> None:
    environ = {"SPECGEN_GAMMA": "3", "SPECGEN_THREADS": "auto", "SPECGEN_KV": "int8", "SPECGEN_QUIET": "true"}
    assert flag_defaults(environ) == {"gamma": "3", "kv": "int8", "quiet": True}


def test_options_are_checked_too() -> None:
    with pytest.raises(UsageError, match="threads is 0"):
        resolve_settings({"threads": 0}, {})


def test_folders_can_be_moved_and_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, folder in (("CACHE", cache_dir), ("CONFIG", config_dir), ("DATA", data_dir)):
        monkeypatch.setenv(f"SPECGEN_{variable}", str(tmp_path / variable))
        assert folder() == tmp_path / variable
        monkeypatch.setenv(f"SPECGEN_{variable}", "")
        assert folder().name == "specgen"
    made = ensure_dir(tmp_path / "a" / "b")
    assert stat.S_IMODE(made.stat().st_mode) == stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(SpecgenError, match="cannot create the folder"):
        ensure_dir(tmp_path / "file" / "b")


def test_numbers_with_a_fraction_and_sizes(config_file: Path) -> None:
    config_file.write_text('keep_alive = 2.5\nweight_cache = "0"\n')
    assert resolve_settings(environ={}) == Settings(keep_alive=2.5, weight_cache="0")
    assert resolve_settings(environ={"SPECGEN_KEEP_ALIVE": "0.5"}).keep_alive == 0.5


def test_what_decides_speed_can_stand_in_the_file(config_file: Path) -> None:
    config_file.write_text(
        'draft = "small"\ndraft_quant = "int4"\ndraft_stop = 0.2\nngram_store = true\ntree = 2\n'
        'max_memory = "6GB"\nquant = "int8"\n'
    )
    wanted = Settings(
        draft="small", draft_quant="int4", draft_stop=0.2, ngram_store=True, tree=2, max_memory="6GB", quant="int8"
    )
    assert resolve_settings(environ={}) == wanted
    environ = {"SPECGEN_TREE": "3", "SPECGEN_NGRAM_STORE": "false", "SPECGEN_MAX_MEMORY": "512MiB"}
    assert resolve_settings(environ=environ).tree == 3
    assert resolve_settings(environ=environ).ngram_store is False
    assert flag_defaults(environ)["max_memory"] == "512MiB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tree = 0", "tree is 0"),
        ('tree = "auto"', "is 'auto'"),
        ("draft_stop = 2", "draft stop is 2"),
        ('quant = "int3"', "int3"),
        ('max_memory = "lots"', "'lots'"),
        ('ngram_store = "yes"', "is 'yes'"),
    ],
)
def test_bad_choices_of_speed_are_refused(config_file: Path, text: str, message: str) -> None:
    config_file.write_text(text + "\n")
    with pytest.raises(UsageError, match=message):
        standing_choices({})


@pytest.mark.parametrize(
    ("text", "message"),
    [("keep_alive = -1", "keep-alive is -1"), ("keep_alive = true", "is True"), ('weight_cache = "much"', "'much'")],
)
def test_bad_numbers_and_sizes_are_refused(config_file: Path, text: str, message: str) -> None:
    config_file.write_text(text)
    with pytest.raises(UsageError, match=message):
        standing_choices({})
