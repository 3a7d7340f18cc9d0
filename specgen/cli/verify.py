"""`specgen verify`: the promises, checked on this machine with this model.

Knows: flags, PASS and FAIL, the exit code. Does not know: how a promise is checked (`specgen.measure.verify`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specgen.cli.charts import print_json, print_lines, progress_bar
from specgen.cli.console import Console
from specgen.cli.flags import ModelFlags
from specgen.cli.measure_flags import (
    ReportFlags,
    WorkloadFlags,
    apply_report_flags,
    chosen_workloads,
    fitting_cases,
    measured_session,
)
from specgen.errors import ExitCode
from specgen.options import check_range

if TYPE_CHECKING:
    from specgen.measure.verify import Claim

SCHEMA_VERSION = 1

_verify = partial(typer.Option, rich_help_panel="Measurement")


@dataclass(frozen=True, slots=True)
class VerifyFlags:
    """How much is checked."""

    count: Annotated[int, _verify("--count", metavar="N", help="Prompts; each is answered many times.")] = 3
    max_tokens: Annotated[int, _verify("-n", "--max-tokens", metavar="N", help="Tokens of an answer, at most.")] = 40


def verify(
    context: typer.Context, model: ModelFlags, texts: WorkloadFlags, flags: VerifyFlags, report: ReportFlags
) -> int:
    """Check that speculation changes nothing here: text, logits, KV, distributions. Exit code 1 if anything fails.

    specgen verify
    specgen verify --count 9 -n 100
    """
    console = Console.of(context)
    apply_report_flags(console, report)
    check_range("--count", flags.count, 1, 10_000)
    check_range("--max-tokens", flags.max_tokens, 2, 1_000_000)
    loads = chosen_workloads(texts)[: flags.count]
    console.answer()
    session = measured_session(context, model)
    from specgen.measure.verify import promise
    from specgen.measure.verify import verify as all_claims

    cases = fitting_cases(console, session, loads, texts, flags.max_tokens)
    claims: list[Claim] = []
    with progress_bar(console) as progress:
        for claim in all_claims(session, cases, progress):
            claims.append(claim)
            if not report.json:
                print_lines(console, _lines(claim))
    failed = sum(not claim.passed for claim in claims)
    if report.json:
        said = session.report()
        known = {"schema_version": SCHEMA_VERSION, "model": said["model"], "versions": said["versions"]}
        told = [{"passed": claim.passed, "claim": claim} for claim in claims]
        kept = {"device": said["device"], "promise": promise(claims).name.lower()}
        print_json(console, {**known, **kept, "passed": failed == 0, "claims": told})
    else:
        verdict = "every promise holds" if not failed else f"{failed} of {len(claims)} promises are broken"
        where = f"{session.loaded.name} on {session.loaded.kernels} ({session.loaded.device})"
        print_lines(console, [f"{where}: {verdict}", promise(claims)])
    return int(ExitCode.ERROR if failed else ExitCode.OK)


def _lines(claim: Claim) -> list[str]:
    if claim.skipped is not None:
        return [f"skip  {claim.name}: {claim.skipped}"]
    passed = claim.checked - claim.failed
    head = f"{'PASS' if claim.passed else 'FAIL'}  {claim.name}: {passed} of {claim.checked}"
    return [head, *(f"      {failure}" for failure in claim.failures)]
