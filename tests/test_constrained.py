"""Constraints on a vocabulary that can be enumerated: the masks by brute force, and the same text for all drafts."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from bytes_tokenizer import words_tokenizer
from fakes import FakeRunner, ScriptedProposer, fake_cache, hashed_logits

from specgen.accept import RULES, AcceptRule
from specgen.draft import Draft
from specgen.engine import Answer, Cancel, Engine
from specgen.errors import SpecgenError, UsageError
from specgen.events import FinishReason
from specgen.kernels.reference import ReferenceKernels
from specgen.options import ConstraintOptions, RunOptions, SamplingOptions
from specgen.propose.base import Proposer
from specgen.propose.forced import ForcedProposer, pruned
from specgen.propose.ngram import NgramProposer
from specgen.propose.none import NoProposer
from specgen.records import RunRecord
from specgen.sampling import Sampler
from specgen.text.answer import AnswerText
from specgen.text.constrained import GrammarConstraint, GrammarCut, GrammarVocabulary
from specgen.text.grammar import GrammarError, compile_grammar
from specgen.tune.controller import AutoGamma, FixedGamma

WORDS = ("a", "b", "c", "ab", "bc")
TOKENIZER = words_tokenizer(WORDS)
VOCAB, END = len(WORDS) + 1, len(WORDS)
VOCABULARY = GrammarVocabulary(TOKENIZER)
EXPRESSION = "(ab|ba)*c{1,3}b"
LONGEST = 6  # characters of the texts that brute force looks at
TARGET = hashed_logits(VOCAB, seed=11, scale=1.5, order=2)
PROMPT = [0, 1, 2, 0, 1]

SENTENCES = [
    text
    for length in range(LONGEST + 1)
    for text in map("".join, itertools.product("abc", repeat=length))
    if re.fullmatch(EXPRESSION, text)
]


@cache
def compiled(kind: Any, source: str) -> str:
    return compile_grammar(ConstraintOptions(kind, source))


def constraint(source: str = EXPRESSION, kind: Any = "regex") -> GrammarConstraint:
    return GrammarConstraint(VOCABULARY, compiled(kind, source))


def spelled(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def brute_force(tokens: Sequence[int]) -> list[bool]:
    """What may follow, by looking at every sentence: those that go on, or the end where the text is one."""
    text = spelled(tokens)
    going = [any(s.startswith(text + word) for s in SENTENCES) for word in WORDS]
    return [*going, text in SENTENCES]


def legal_paths(most: int) -> list[tuple[int, ...]]:
    """Every path of tokens after which the sentence can still be finished within LONGEST characters."""
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        if len(path) < most:
            paths += [(*path, token) for token, may in enumerate(brute_force(path)[:END]) if may]
    return paths


PATHS = [path for path in legal_paths(4) if len(spelled(path)) <= LONGEST - 4]


def wrong_masks(build: Callable[[], GrammarConstraint], order: Sequence[tuple[int, ...]]) -> int:
    """How many paths, asked in that order of one constraint, get another mask than brute force says."""
    grammar = build()
    return sum(grammar.allowed(path).tolist() != brute_force(path) for path in order)


def shuffled(seed: int = 1) -> list[tuple[int, ...]]:
    order = PATHS * 2
    random.Random(seed).shuffle(order)
    return order


def test_masks_are_those_of_brute_force_in_any_order() -> None:
    assert len(PATHS) > 5
    assert wrong_masks(constraint, PATHS) == 0
    assert wrong_masks(constraint, shuffled()) == 0


class NeverRollsBack(GrammarConstraint):
    """A mutant: draft tokens of one row stay for the next."""

    def _move(self, path: Sequence[int]) -> bool:
        for token in path[len(self._at) :]:
            if self._matcher.validate_tokens([token]) != 1:
                return False
            self._matcher.consume_token(token)
            self._at.append(token)
        return True


class ForgetsThePath(GrammarConstraint):
    """A mutant: every row gets the mask of row 0."""

    def allowed(self, path: Sequence[int]) -> torch.Tensor:
        return super().allowed(())


class KeepsStaleMasks(GrammarConstraint):
    """A mutant: what was known of a path is kept although the answer went on."""

    def commit(self, tokens: Sequence[int]) -> None:
        self._committed.extend(tokens)


def build(kind: type[GrammarConstraint]) -> Callable[[], GrammarConstraint]:
    return lambda: kind(VOCABULARY, compile_grammar(ConstraintOptions("regex", EXPRESSION)))


@pytest.mark.parametrize("mutant", [NeverRollsBack, ForgetsThePath])
def test_masks_of_mutants_are_wrong(mutant: type[GrammarConstraint]) -> None:
    assert wrong_masks(build(mutant), shuffled()) > 0


WARM = SamplingOptions(temperature=0.9, seed=7)
PENALISED = SamplingOptions(temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.3, logit_bias=((2, -0.5),))


@pytest.mark.parametrize("options", [WARM, PENALISED, SamplingOptions(temperature=1.0, top_k=2, top_p=0.9, min_p=0.05)])
def test_the_distribution_is_the_targets_on_what_is_allowed(options: SamplingOptions) -> None:
    free = Sampler(options, ReferenceKernels(), PROMPT, VOCAB)
    held = Sampler(options, ReferenceKernels(), PROMPT, VOCAB, constraint())
    for path in PATHS:
        logits = TARGET((*PROMPT, *path))
        adjusted = free.adjust(logits, path).masked_fill(~torch.tensor(brute_force(path)), -torch.inf)
        plain = Sampler(SamplingOptions(options.temperature, options.top_k, options.top_p, options.min_p),
                        ReferenceKernels(), PROMPT, VOCAB)  # fmt: skip
        assert torch.equal(held.probs(logits, path), plain.probs(adjusted, ()))


def answer_with(
    proposer: Proposer,
    gamma: int | None = 4,
    *,
    options: SamplingOptions = WARM,
    rule: AcceptRule | None = None,
    grammar: GrammarConstraint | None = None,
    stop: Sequence[str] = (),
    max_tokens: int | None = 40,
) -> tuple[str, FinishReason, RunRecord]:
    """One answer of the fake target under the constraint, by the proposer inside ForcedProposer."""
    grammar = grammar or constraint()
    text = AnswerText(TOKENIZER, stop)
    policy = AutoGamma() if gamma is None else FixedGamma(gamma)
    answer = Answer(
        prompt=PROMPT,
        proposer=ForcedProposer(grammar, proposer, policy),
        policy=policy,
        rule=rule or RULES["coupled"](),
        sampler=Sampler(options, ReferenceKernels(), PROMPT, VOCAB, grammar),
        cut=GrammarCut(text.cut, grammar),
        max_tokens=max_tokens,
        cancel=Cancel(),
    )
    engine, record = Engine(FakeRunner(TARGET), fake_cache()), RunRecord()
    assert engine.prefill(answer, record)
    reason = FinishReason.CANCELLED
    for cycle in engine.decode(answer, record):
        list(text.pieces(cycle.tokens, cycle.accepted))
        reason = cycle.reason or reason
    list(text.flush())
    return text.text, reason, record


def liar(seed: int) -> ScriptedProposer:
    """Random tokens, legal or not, as chains and trees."""
    rng = random.Random(seed)

    def guess(committed: Sequence[int], limit: int) -> Draft | None:
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(rng.randint(0, limit)):
            parent = rng.randint(-1, len(tokens) - 1)
            siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            if free := sorted(set(range(VOCAB)) - siblings):
                tokens.append(rng.choice(free))
                parents.append(parent)
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens)) if tokens else None

    return ScriptedProposer(guess)


def whole(text: str) -> bool:
    return re.fullmatch(EXPRESSION, text) is not None


@pytest.mark.parametrize("options", [SamplingOptions(), WARM, PENALISED])
def test_the_text_is_the_same_for_all_drafts_and_always_a_sentence(options: SamplingOptions) -> None:
    for seed in range(6):
        options = SamplingOptions(**{**_fields(options), "seed": seed})
        plain = answer_with(NoProposer(), 0, options=options)[:2]
        if plain[1] is not FinishReason.LENGTH:  # (ab)* may go on for ever
            assert whole(plain[0])
        for gamma in (1, 3, 8, None):
            assert answer_with(NgramProposer(), gamma, options=options)[:2] == plain
            assert answer_with(liar(seed), gamma, options=options)[:2] == plain


def _fields(options: SamplingOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_other_rules_write_sentences_too(rule: Any) -> None:
    reasons = set()
    for seed in range(30):
        options = SamplingOptions(temperature=1.0, seed=seed)
        text, reason, _ = answer_with(liar(seed), 5, options=options, rule=RULES[rule]())
        reasons.add(reason)
        assert whole(text) or reason is FinishReason.LENGTH
    assert FinishReason.GRAMMAR in reasons


def test_a_mutant_that_keeps_stale_masks_changes_the_text() -> None:
    """The check above sees a constraint that does not follow the commits."""
    differing = 0
    for seed in range(6):
        options = SamplingOptions(temperature=0.9, seed=seed)
        right = answer_with(NoProposer(), 0, options=options)[0]
        differing += answer_with(NgramProposer(), 3, options=options, grammar=build(KeepsStaleMasks)())[0] != right
    assert differing


def test_rejection_keeps_the_constrained_distribution() -> None:
    """The first two tokens' frequencies against the exact products of the masked distributions."""
    count = 800
    seen: dict[str, int] = {}
    for seed in range(count):
        options = SamplingOptions(temperature=1.0, seed=seed)
        text = answer_with(liar(seed), 3, options=options, rule=RULES["rejection"](), max_tokens=2)[0]
        seen[text] = seen.get(text, 0) + 1
    expected = _two_tokens()
    assert set(seen) <= set(expected)
    assert abs(sum(expected.values()) - 1.0) < 1e-5
    statistic = sum((seen.get(text, 0) - count * p) ** 2 / (count * p) for text, p in expected.items() if p > 0.005)
    assert statistic < 40, (statistic, expected)  # about a dozen cells: chance 1e-4 at 37


def _two_tokens() -> dict[str, float]:
    found: dict[str, float] = {}
    for first, p in enumerate(_masked(())):
        for second, q in enumerate(_masked((first,)) if p and first != END else [1.0]):
            if p * q > 0:
                tokens = (first, second) if first != END else ()
                text = spelled([t for t in tokens if t != END])
                found[text] = found.get(text, 0.0) + p * q
    return found


def _masked(path: tuple[int, ...]) -> list[float]:
    allowed = torch.tensor(brute_force(path))
    return torch.softmax(TARGET((*PROMPT, *path)).masked_fill(~allowed, -torch.inf), 0).tolist()


def test_the_end_of_the_grammar_ends_the_answer() -> None:
    text, reason, record = answer_with(NoProposer(), 0, grammar=constraint("abc"))
    assert (text, reason) == ("abc", FinishReason.GRAMMAR)
    assert record.completion_tokens == 2 or record.completion_tokens == 3, "and no end token is needed"


def test_the_model_ends_only_where_the_grammar_may() -> None:
    ended = 0
    for seed in range(40):
        text, reason, _ = answer_with(
            NgramProposer(), 3, grammar=constraint("a(bca)*"), options=SamplingOptions(temperature=1.5, seed=seed)
        )
        if reason is FinishReason.EOS:
            ended += 1
            assert re.fullmatch("a(bca)*", text)
    assert ended > 5


def test_forced_tokens_are_a_draft_that_is_always_right() -> None:
    text, _, record = answer_with(NoProposer(), 8, grammar=constraint("(cb){4}a"))
    assert text == "cbcbcbcba"
    assert record.accepted == record.proposed > 0
    assert all(cycle.source == "forced" for cycle in record.cycles if cycle.proposed)
    assert len(record.cycles) < record.completion_tokens


def test_drafts_lose_what_is_forbidden_and_what_follows_it() -> None:
    grammar = constraint("ab(c|b)")
    a, b, c = 0, 1, 2
    # A tree: a → (b → c, c → b), b → c; legal are a, b and the c behind them.
    draft = Draft((a, b, b, c, c, b), (-1, -1, 0, 0, 2, 3), (None,) * 6, "liar", 3)
    kept = pruned(draft, grammar)
    assert kept is not None
    assert (kept.tokens, kept.parents, kept.source, kept.match) == ((a, b, c), (-1, 0, 1), "liar", 3)
    assert pruned(Draft.chain([c, a]), grammar) is None
    assert pruned(Draft.chain([a, b, b, END, a]), grammar) == Draft.chain([a, b, b, END])


def test_n_gram_drafts_are_cut_at_the_first_forbidden_token() -> None:
    grammar = constraint("[abc]{2}c{3}")
    inner = ScriptedProposer(lambda committed, limit: Draft.chain([0, 1, 2, 0, 0][:limit]))
    draft = ForcedProposer(grammar, inner, FixedGamma(5)).propose(PROMPT, 5)
    assert draft is not None
    assert draft.tokens == (0, 1, 2)


def test_stop_strings_end_constrained_answers_too() -> None:
    text, reason, _ = answer_with(NgramProposer(), 4, grammar=constraint("(ab){2}c(ab){9}"), stop=("ca",))
    assert (text, reason) == ("abab", FinishReason.STOP)
    assert constraint("(ab){2}c(ab){9}").accepts(text) is False
    assert constraint("(ab)*c?").accepts(text) is True


def test_bias_and_grammar_that_leave_nothing_are_an_error() -> None:
    with pytest.raises(SpecgenError, match="leave no token"):
        answer_with(NoProposer(), 0, grammar=constraint("c+"), options=SamplingOptions(logit_bias=((2, -torch.inf),)))


def test_a_place_that_no_token_fits_is_an_error() -> None:
    with pytest.raises(SpecgenError, match="no token of this model"):
        answer_with(NoProposer(), 0, grammar=constraint("abz"))


def test_a_vocabulary_without_an_end_token() -> None:
    tokenizer = words_tokenizer(WORDS, end=False)
    grammar = GrammarConstraint(GrammarVocabulary(tokenizer), compile_grammar(ConstraintOptions("regex", "ab|abc+")))
    assert grammar.allowed((0,)).tolist() == [False, True, False, False, True]
    assert grammar.allowed((0, 1)).tolist() == [False, False, True, False, False]
    assert grammar.end([0, 1]) is None
    closed = GrammarConstraint(GrammarVocabulary(tokenizer), compile_grammar(ConstraintOptions("regex", "ab")))
    assert closed.end([0, 1]) == 1


def test_rows_behind_the_end_have_a_distribution() -> None:
    grammar = constraint("ab")
    assert grammar.allowed((0, 1)).tolist() == [False] * END + [True]
    assert grammar.allowed((0, 1, END)).tolist() == [False] * END + [True]
    assert grammar.allowed((0, 1, END, 2, 2)).tolist() == [False] * END + [True]
    assert grammar.allowed(()).tolist() == [True] + [False] * END, "and the matcher comes back"


def test_forced_text_is_spelled_as_the_tokenizer_spells_it() -> None:
    """The words `ab` and `bc` have no merges, so this tokenizer never writes them where nothing else fits."""
    assert constraint("abc").forced(8) == TOKENIZER.encode("abc", add_special=False) == [0, 1, 2]
    assert constraint("ab|b").allowed(()).tolist() == [True, True, False, True, False, False]


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(a", "unclosed group"),
        ("json-schema", '{"type":', "not JSON"),
        ("json-schema", "[1]", "no JSON object"),
        ("json-schema", '{"type": "foo"}', "Invalid type"),
        ("json-schema", '{"a":' * 300 + "1" + "}" * 300, "nested"),
        ("json-schema", '{"a":' * 100_000 + "1" + "}" * 100_000, "nested"),
        ("json-schema", '{"type": "string", "format": "no-such"}', "cannot be used"),
        ("grammar", 'start: "a" b', "unknown name"),
        ("grammar", "root ::= (", "cannot be used"),
        ("regex", "a" * (2 << 20), "more than"),
    ],
)
def test_bad_sources_are_usage_errors(kind: Any, source: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_grammar(ConstraintOptions(kind, source))


@pytest.mark.parametrize("source", ['start: "a" start | "b"', 'root ::= "a" root | "b"'])
def test_lark_and_gbnf(source: str) -> None:
    grammar = constraint(source, "grammar")
    assert grammar.accepts("aaab")
    assert not grammar.accepts("aaa")
    assert grammar.allowed(()).tolist()[:3] == [True, True, False]


def test_a_special_token_in_a_grammar() -> None:
    compile_grammar(ConstraintOptions("grammar", 'start: "a" <|end|>'))  # checked when there is a tokenizer
    with pytest.raises(GrammarError, match="with this model"):
        GrammarConstraint(VOCABULARY, compile_grammar(ConstraintOptions("grammar", 'start: "a" <|none|>')))


def test_json_is_compact_unless_the_schema_says_otherwise() -> None:
    tokenizer = words_tokenizer([chr(code) for code in range(0x20, 0x7F)] + ["\n"])
    vocabulary = GrammarVocabulary(tokenizer)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}}, "required": ["a", "b"]}
    value = {"a": 12, "b": "x"}
    loose = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}

    def accepts(schema: object, text: str) -> bool:
        options = ConstraintOptions("json-schema", json.dumps(schema))
        return GrammarConstraint(vocabulary, compile_grammar(options)).accepts(text)

    assert accepts(schema, json.dumps(value))
    assert not accepts(schema, json.dumps(value, indent=1))
    assert accepts({**schema, "x-guidance": loose}, json.dumps(value, indent=1))
    assert GrammarConstraint(vocabulary, compile_grammar(ConstraintOptions("json-object"))).accepts('{"q": [1, {}]}')


def test_ignore_eos_is_refused() -> None:
    with pytest.raises(UsageError, match="ignore-eos"):
        RunOptions(constraint=ConstraintOptions("json-object"), ignore_eos=True)
