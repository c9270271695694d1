"""Commands that run studies and look at them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qsim.cli.app import app, console

if TYPE_CHECKING:
    from qsim.report.products import Rows
    from qsim.sweep.config import Study
    from qsim.sweep.kinds import Kind


@app.command()
def sweep(
    study: Annotated[Path | None, typer.Argument(help="A study file (TOML); without one, the default study.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for journal, tables and figure.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one a core; cuda: 1.")] = None,
    backend: Annotated[str, typer.Option(help="numba, oracle, emulated, cuda or auto; default: the study's.")] = "",
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="float32 BLAS products; not reproducible to the bit.")] = False,
    extend: Annotated[bool, typer.Option("--extend", help="Add a changed study's cells to a folder.")] = False,
) -> None:
    """Run a study over its grid and print its table; resumes by itself after any interruption."""
    from qsim._paths import studies_dir
    from qsim.backends import resolve_backend
    from qsim.report.products import REPORTS, write_products
    from qsim.sweep.config import read_study
    from qsim.sweep.known import registries
    from qsim.sweep.progress import SweepProgress
    from qsim.sweep.sweep import run_sweep

    path = study or studies_dir() / "default.toml"
    overrides = list(sets or [])
    overrides += [f"{_choice(path, '--backend')}={resolve_backend(backend)}"] if backend else []
    overrides += [_choice(path, "--fast")] if fast else []
    config = read_study(path, registries(), overrides)
    _check(config)
    folder = out or _default_out(path, overrides)
    try:
        with SweepProgress() as progress:
            outcome = run_sweep(config, out=folder, workers=workers, extend=extend, progress=progress)
        seconds = progress.seconds
    except KeyboardInterrupt:
        print(f"qsim: stopped; what is finished stays in {folder}, call again to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    rows = [(f.cell, f.record) for f in outcome.finished]
    products = write_products(rows, folder, title=config.title or path.stem, kind=outcome.kind)
    _show_table(rows, outcome.kind)  # after the files: a closed pipe loses nothing
    print(products)
    work = REPORTS[outcome.kind.name].work
    if work is not None:
        print(work(rows, None if outcome.done_before else seconds))
    print(outcome.summary)
    print(f"sha256 of the results: {outcome.digest}")
    for bad in (*outcome.failed, *outcome.crashed):
        print(f"qsim: {bad.cell.name}: {bad.error}", file=sys.stderr)
    odd = [cell for cell, record in rows if not record.as_expected]
    for cell in odd:
        print(f"qsim: unexpected outcome: {cell.name}", file=sys.stderr)
    raise typer.Exit(1 if odd or outcome.failed or outcome.crashed else 0)


def _default_out(path: Path, overrides: list[str]) -> Path:
    """qsim-out/STUDY, and a folder of its own for each set of overrides, so that all of them resume."""
    import hashlib

    mark = hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:8]
    return Path("qsim-out") / (f"{path.stem}-{mark}" if overrides else path.stem)


def _choice(path: Path, option: str) -> str:
    """What ``option`` stands for in a study. Refused where it means nothing: it would be a false promise."""
    from qsim.sweep.config import study_kind
    from qsim.sweep.kinds import KINDS, LIFECYCLE

    kind = KINDS.get(name := study_kind(path), LIFECYCLE)  # an unknown kind is refused when the study is read
    found = kind.fast if option == "--fast" else kind.backend
    if not found:
        able = " or ".join(one.name for one in KINDS.values() if one.fast)
        raise typer.BadParameter(
            f"{path} is of kind {name}: only a {able} study chooses its arithmetic; leave {option} out",
            param_hint=option,
        )
    return found


def _check(config: Study) -> None:
    """Raise now what every cell would raise later."""
    from qsim.sweep.schema import SweepConfig
    from qsim.sweep.training.schema import TrainingConfig

    match config:
        case SweepConfig():
            from qsim.sweep.run import check_cells

            check_cells(config.cells())
        case TrainingConfig():
            from qsim.sweep.training.run import check_cells as check_runs

            check_runs(config.cells())


def _show_table(rows: Rows, kind: Kind) -> None:
    from qsim.report.products import REPORTS

    out, report = console(), REPORTS[kind.name]
    for table in report.tables(rows, width=out.width):
        out.print(table, "")
    for line in report.notes(rows):
        out.print(line)


@app.command()
def status(
    out: Annotated[Path, typer.Argument(help="Output folder of a sweep.")] = Path("qsim-out/default"),
    table: Annotated[bool, typer.Option("--table", help="Also print the table so far.")] = False,
) -> None:
    """Say how far a sweep is, also while it runs."""
    from qsim.sweep.sweep import read_sweep

    view = read_sweep(out)
    print(
        f"{out}: {len(view.finished)} of {view.total} cells done, {len(view.pending)} pending, "
        f"{len(view.failed)} failed, {len(view.crashed)} crashed"
    )
    for bad in (*view.failed, *view.crashed):
        print(f"  {bad.cell.name}: {bad.error}")
    if table:
        _show_table([(f.cell, f.record) for f in view.finished], view.kind)
