"""The stored answer to "what is the fastest setting here?".

Knows: what a plan is valid for, and its file. Does not know: how it was found or who uses it. One JSON file for each
(model, device, temperature class, context class), written whole or not at all. A plan made on another device or by
another version is left alone and not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from specgen.errors import SpecgenError
from specgen.options import MAX_GAMMA, NEED_DRAFT
from specgen.paths import data_dir, ensure_dir
from specgen.tune.predict import Costs, ProposeMs
from specgen.tune.setting import Setting, checked_object

SCHEMA = 2
MOST_BYTES = 1 << 20
LONG_TOKENS = 2048
"""Prompts from here on are another class: attention then costs as much as the weights of a small model."""

TemperatureClass = Literal["greedy", "sampled"]
ContextClass = Literal["short", "long"]


def temperature_class(temperature: float) -> TemperatureClass:
    return "greedy" if temperature == 0.0 else "sampled"


def context_class(prompt_tokens: int) -> ContextClass:
    return "long" if prompt_tokens >= LONG_TOKENS else "short"


def texts_in_words(temperature: TemperatureClass, context: ContextClass) -> str:
    return f"{temperature} text" + (" after long prompts" if context == "long" else "")


@dataclass(frozen=True, slots=True)
class Scope:
    """What was measured on: a plan holds for exactly this."""

    digest: str  # of the model's files
    device: str  # processor, kernels, threads, format of the KV cache
    versions: str  # of specgen and torch
    draft: str | None = None  # digest of the draft model, where one is loaded


@dataclass(frozen=True, slots=True)
class Plan:
    scope: Scope
    model: str  # for people
    temperature: TemperatureClass
    context: ContextClass
    setting: Setting
    fixed_gamma: int  # the best γ that stays the same, for servers that cannot adapt it
    speedup: tuple[float, float, float]  # low, middle, high
    by_kind: Mapping[str, float]
    costs: Costs
    objective: str
    created: str  # ISO 8601, UTC
    why: str
    draft: str | None = None  # name of the draft model, for people

    def stale(self, scope: Scope) -> str | None:
        """Why this plan does not hold for `scope`, in words.

        What was the fastest beside a draft model, without using it, is also the fastest where there is none.
        """
        mine = self.scope
        if mine.digest != scope.digest:
            return "it is for another model"
        if mine.device != scope.device:
            return f"it was tuned on {mine.device}"
        if mine.versions != scope.versions:
            return f"it was tuned with {mine.versions}"
        if mine.draft == scope.draft or (scope.draft is None and self.setting.proposer not in NEED_DRAFT):
            return None
        return "it was tuned without this draft model" if mine.draft is None else "it was tuned with a draft model"

    @property
    def notice(self) -> str:
        """One line for whoever is about to run with it."""
        gain = "" if self.setting.is_plain else f", {self.speedup[1]:.2f}x plain when tuned"
        return f"tuned: {self.setting.label} for {self.texts}{gain} ({self.created[:10]})"

    @property
    def texts(self) -> str:
        """What it is for, in words."""
        return texts_in_words(self.temperature, self.context)

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **plain,
            "schema": SCHEMA,
            "scope": asdict(self.scope),
            "setting": self.setting.to_json(),
            "speedup": list(self.speedup),
            "by_kind": dict(self.by_kind),
            "costs": costs_to_json(self.costs),
        }

    @classmethod
    def from_json(cls, value: object) -> Plan:
        """SpecgenError for anything that `to_json` would not have written, unknown keys included."""
        if isinstance(value, dict) and value.get("schema") != SCHEMA:
            raise SpecgenError(f"it has the schema {value.get('schema')!r}, not {SCHEMA}: another version wrote it")
        known = checked_object(value, [*(field.name for field in fields(cls)), "schema"], "a plan")
        scope = checked_object(known["scope"], [field.name for field in fields(Scope)], "the scope of a plan")
        names = [text for text in (scope["draft"], known["draft"]) if text is not None]
        texts = [scope[name] for name in ("digest", "device", "versions")]
        texts += [known[name] for name in ("model", "objective", "created", "why")]
        if not all(isinstance(text, str) for text in (*texts, *names)):
            raise SpecgenError("a plan has a number where text belongs")
        if known["temperature"] not in get_args(TemperatureClass) or known["context"] not in get_args(ContextClass):
            raise SpecgenError("a plan is for a class of text that does not exist")
        words = ("model", "temperature", "context", "objective", "created", "why", "draft")
        speedup = tuple(_number(x, "a speedup") for x in _list(known["speedup"], "a speedup"))
        if len(speedup) != 3:
            raise SpecgenError("a plan's speedup is not low, middle and high")
        return cls(
            scope=Scope(**scope),
            setting=Setting.from_json(known["setting"]),
            fixed_gamma=_gamma(known["fixed_gamma"]),
            speedup=speedup,
            by_kind=_numbers(known["by_kind"], "by_kind"),
            costs=costs_from_json(known["costs"]),
            **{name: known[name] for name in words},
        )


def costs_to_json(costs: Costs) -> dict[str, Any]:
    steps = {str(context): {str(r): ms for r, ms in table.items()} for context, table in costs.steps.items()}
    propose = {name: asdict(ms) for name, ms in costs.propose.items()}
    return {"steps": steps, "token_ms": costs.token_ms, "cycle_ms": costs.cycle_ms, "propose": propose}


def costs_from_json(value: object) -> Costs:
    known = checked_object(value, ["steps", "token_ms", "cycle_ms", "propose"], "the costs of a plan")
    steps = {_count(c): {_count(r): ms for r, ms in _numbers(t, "t(R)").items()} for c, t in _items(known["steps"])}
    if not steps or not all(steps.values()):
        raise SpecgenError("the costs of a plan are empty")
    propose = {
        name: ProposeMs(**_numbers(checked_object(cost, ["once", "each", "read"], "a cost"), "a cost"))
        for name, cost in _items(known["propose"])
    }
    return Costs(steps, _number(known["token_ms"], "token_ms"), _number(known["cycle_ms"], "cycle_ms"), propose)


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise SpecgenError(f"{what} of a plan is not a list")
    return value


def _items(value: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise SpecgenError("a table of a plan is not an object")
    yield from value.items()


def _numbers(value: object, what: str) -> dict[str, float]:
    return {key: _number(number, what) for key, number in _items(value)}


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise SpecgenError(f"{what} of a plan is {value!r}, not a number ≥ 0")
    return float(value)


def _gamma(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_GAMMA:
        raise SpecgenError(f"fixed_gamma of a plan is {value!r}")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise SpecgenError(f"a plan counts {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class PlanBook:
    """The plans that hold for one loaded model, and what is worth saying about those that do not."""

    plans: tuple[Plan, ...] = ()
    notes: tuple[str, ...] = ()

    def choice(self, temperature: float, prompt_tokens: int) -> Plan | None:
        """The plan for an answer at this temperature after a prompt of this length."""
        wanted = temperature_class(temperature), context_class(prompt_tokens)
        return next((plan for plan in self.plans if (plan.temperature, plan.context) == wanted), None)

    @property
    def costs(self) -> Costs | None:
        """What the machine was calibrated at, for answers that no plan is for."""
        return self.plans[0].costs if self.plans else None


class PlanStore:
    """The plans of all models, in one folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or data_dir() / "plans"

    def save(self, plan: Plan) -> Path:
        """Written beside and renamed, so that a reader sees the old plan or the new one."""
        path = self.folder / self._name(plan)
        write_json(path, plan.to_json())
        return path

    def book(self, scope: Scope) -> PlanBook:
        """The plans for `scope`; stale ones of the same model and unreadable ones are noted and not used."""
        plans: list[Plan] = []
        notes: list[str] = []
        for path in self._files(scope.digest):
            try:
                plan = self.read(path)
            except SpecgenError as error:
                notes.append(f"the stored plan {path.name} is ignored: {error.message}")
                continue
            if (stale := plan.stale(scope)) is None:
                plans.append(plan)
            else:
                notes.append(f"the stored plan for {plan.texts} is ignored: {stale} (`specgen tune` again)")
        plans.sort(key=lambda plan: plan.scope.draft != scope.draft)  # the first of a class is used
        # Where there are plans that hold, what is said of the others would only confuse.
        return PlanBook(tuple(plans), () if plans else tuple(dict.fromkeys(notes)))

    def all(self, digest: str | None = None) -> list[Plan]:
        """Every plan that can be read (of one model), newest last."""
        plans: list[Plan] = []
        for path in self._files(digest):
            try:
                plans.append(self.read(path))
            except SpecgenError:
                continue  # `book` says so to whoever would have used it
        return sorted(plans, key=lambda plan: plan.created)

    def forget(self, digest: str) -> int:
        """Remove all plans of a model, stale and unreadable ones too; how many there were. What its answers taught and
        the sublayers that may be left out, whose files stand beside, go with them."""
        plans, key = self._files(digest), file_key(digest)
        others = [*self.folder.glob(f"{key}-*.costs"), *self.folder.glob(f"{key}.skip")]
        for path in (*plans, *others):
            path.unlink(missing_ok=True)
        return len(plans)

    def _name(self, plan: Plan) -> str:
        rest = json.dumps([plan.scope.device, plan.scope.draft, plan.temperature, plan.context])
        return f"{file_key(plan.scope.digest)}-{file_key(rest)}.json"

    def _files(self, digest: str | None) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(self.folder.glob("*.json" if digest is None else f"{file_key(digest)}-*.json"))

    @staticmethod
    def read(path: Path) -> Plan:
        """SpecgenError when the file is no plan."""
        return Plan.from_json(read_json(path))


def file_key(text: str) -> str:
    """`text` (a digest, say) as a part of a file's name."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_json(path: Path) -> Any:
    """A small JSON file of our own; SpecgenError when it is not one."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SpecgenError(f"{path} is too large")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecgenError(f"cannot read {path}: {reason}") from error


def write_json(path: Path, value: object) -> None:
    """Atomically, in a private folder. SpecgenError when that cannot be done."""
    ensure_dir(path.parent)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, ensure_ascii=False, indent=1, allow_nan=False)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise SpecgenError(
            f"cannot write {path}: {error.strerror}", hint="free some space or set SPECGEN_DATA"
        ) from error
