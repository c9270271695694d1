"""The command line: parses words, calls a door, prints, exits. Imports nothing heavy before a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from qsim import __version__
from qsim.errors import OutputError, QsimError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from qsim.report.products import Rows
    from qsim.sweep.kinds import Kind

app = typer.Typer(
    name="qsim",
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Bit-exact FP8/FP4 codecs, and the lifecycle of stateful quantizers under activation recompute.",
    epilog="Exit codes: 0 as expected, 1 an unexpected outcome or failed cells, 2 usage, 3 unreadable input or "
    "unwritable output, 130 Ctrl-C.",
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
WIDTH = 126
"""Columns assumed where the output is no terminal."""


def main() -> NoReturn:
    """Run the command line; a user's mistake is one clear message and an exit code, never a traceback."""
    try:
        app()  # ends in SystemExit; usage errors are typer's own, with exit code 2
    except QsimError as error:
        print(f"qsim: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except RuntimeError as error:  # a kernel that could not be built or launched says why
        if type(error).__module__ != "cuda_kernels":
            raise
        print(f"qsim: {error}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    except MemoryError as error:  # of a device it says how much was asked for; of this machine it says nothing
        print(f"qsim: {error or 'out of memory: use fewer replicas or smaller tensors'}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    except OSError as error:  # standard output: its reader is gone (nothing is lost), or its device is full
        _forget_stdout()
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        print(f"qsim: standard output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(OutputError.exit_code)
    sys.exit(0)


def _forget_stdout() -> None:
    """Send the rest of standard output nowhere, so that the interpreter's last flush cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _console() -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, which means something else here
            _forget_stdout()

    out = Quiet(highlight=False)
    return out if out.is_terminal else Quiet(highlight=False, width=WIDTH)


def _print_json(data: object) -> None:
    import json

    print(json.dumps(data, indent=2, allow_nan=False))


def _version(value: bool) -> None:
    if value:
        print(f"qsim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Bit-exact FP8/FP4 codecs, and the lifecycle of stateful quantizers under activation recompute."""


@app.command()
def demo() -> None:
    """Tell the article's story in three rows; under ten seconds, writes no file."""
    from qsim.report.demo import LAYERS, REPLICAS, STEPS, demo_rows, demo_table

    console = _console()
    rows = demo_rows()
    console.print(demo_table(rows))
    console.print(
        f"\nFP8 E4M3 delayed scaling, window 1, real activations, {STEPS} steps x {LAYERS} layers, {REPLICAS} seeds. "
        "commits: per owner and step.\ngain: descale used / descale paired (median factor, farthest from 1). "
        "error: of GEMM outputs against the correct twin.\n"
        "Next: python -m qsim defects, python -m qsim sweep"
    )
    raise typer.Exit(0 if all(record.as_expected for _, record in rows) else 1)


@app.command()
def formats(json: JsonFlag = False) -> None:
    """List number formats with their limits, cast policies, recipes and presets."""
    from qsim.report.registries import formats_data, formats_tables

    if json:
        _print_json(formats_data())
        return
    console = _console()
    for table in formats_tables():
        console.print(table, "")


@app.command()
def bench(
    size: Annotated[int, typer.Option(min=1, help="Mi elements for codecs; 64 needs about 2 GB of memory.")] = 64,
    side: Annotated[int, typer.Option(min=64, help="Rows and columns of the matrix products.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that are measured.")] = 7,
    only: Annotated[str, typer.Option(help="codecs or products; both by default.")] = "",
    json: JsonFlag = False,
) -> None:
    """Measure codecs and products on this machine against NumPy and, where installed, ml_dtypes, torch and others."""
    from qsim.report.bench import bench_data, bench_notes, bench_rows, bench_table
    from qsim.report.bench_gemm import product_data, product_rows, product_table

    if only not in ("", "codecs", "products"):
        raise UsageError(f"--only {only!r}: choose codecs or products")
    codecs = () if only == "products" else bench_rows(mebi=size, rounds=rounds)
    products = () if only == "codecs" else product_rows(side=side, rounds=rounds)
    if json:
        _print_json({"codecs": bench_data(codecs), "products": product_data(products)})
        return
    console = _console()
    if codecs:
        console.print(bench_table(codecs), "")
        for note in bench_notes(codecs):
            console.print(note)
    if products:
        console.print(*([""] if codecs else []), product_table(products))
        console.print("floor, for the default side: GMAC/s of a model, else speed over the peer. '!': below it.")


@app.command()
def doctor(json: JsonFlag = False) -> None:
    """Say what works on this machine, and of what does not, why."""
    from qsim.report.doctor import doctor_data, doctor_table, findings

    if json:
        data = doctor_data()
        _print_json(data)
        works = bool(data["works"])
    else:
        found = findings()
        _console().print(doctor_table(found))
        works = all(f.fine for f in found if f.needed)
    if not works:
        raise typer.Exit(1)


@app.command()
def defects(json: JsonFlag = False) -> None:
    """List the defects, the invariants that each breaks, and the fixes that silence it."""
    from qsim.report.registries import defects_data, defects_tables

    if json:
        _print_json(defects_data())
        return
    console = _console()
    for table in defects_tables():
        console.print(table, "")


@app.command()
def run(
    defect: Annotated[str, typer.Argument(help='A defect by id or name (see "defects"), or "correct".')] = "correct",
    fmt: Annotated[str, typer.Option("--format", help="Number format.")] = "e4m3",
    recipe: Annotated[str, typer.Option(help="delayed, centred or current.")] = "delayed",
    window: Annotated[int, typer.Option(min=1, help="Length of the amax history.")] = 1,
    preset: Annotated[str, typer.Option(help="How the system orders its events.")] = "seed_correct",
    fix: Annotated[str, typer.Option(help="A fix to put on top of the defect.")] = "",
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Number of seeds.")] = 4,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches a step.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 1,
    backend: Annotated[str, typer.Option(help="numba, oracle, emulated, cuda or auto.")] = "numba",
    tensors: Annotated[str, typer.Option(help="A capture file of your own.")] = "builtin",
) -> None:
    """Replay one case and show what it breaks and costs, step by step."""
    from qsim.errors import CaseError
    from qsim.report.one_case import case_report
    from qsim.sim import FIXES
    from qsim.sweep.config import load_study
    from qsim.sweep.known import registries
    from qsim.sweep.run import replay_cell

    if fix and fix not in FIXES:
        raise typer.BadParameter(f'"{fix}" is unknown; known: {", ".join(FIXES)}', param_hint="--fix")
    study = _one_cell_study(defect, fmt, recipe, window, preset, backend)
    sizes = {"steps": steps, "microbatches": microbatches, "layers": layers, "workers": workers}
    sets = [f"schedule.{key}={value}" for key, value in sizes.items()]
    sets += [f"replicas.count={replicas}", f"workload.tensors={tensors}"]
    (cell,) = load_study(study, registries(), sets).cells()
    try:
        outcome = replay_cell(cell, fix=fix)
    except CaseError as error:
        print(f"qsim: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    console = _console()
    for part in case_report(cell, outcome, fix=fix):
        console.print(part)
    raise typer.Exit(0 if outcome.record.as_expected else 1)


def _one_cell_study(defect: str, fmt: str, recipe: str, window: int, preset: str, backend: str) -> str:
    """The words of ``run`` as a study of one cell, so that they are checked in one place."""
    import json

    from qsim.backends import resolve_backend
    from qsim.sim import CONTRASTS, DEFECTS

    by_name = {d.name: d.id for d in (*DEFECTS.values(), *CONTRASTS.values())}
    text = json.dumps  # a JSON string is a TOML string
    return (
        f"schema = 1\n[grid]\ndefects = [{text(by_name.get(defect, defect))}]\nformats = [{text(fmt)}]\n"
        f"recipes = [{text(recipe)}]\nwindows = [{window}]\n"
        f"[run]\npreset = {text(preset)}\nbackend = {text(resolve_backend(backend))}\n"
    )


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
    from qsim.report.products import write_products
    from qsim.sweep.config import SweepConfig, read_study
    from qsim.sweep.known import registries
    from qsim.sweep.progress import SweepProgress
    from qsim.sweep.run import check_cells
    from qsim.sweep.sweep import run_sweep

    path = study or studies_dir() / "default.toml"
    if backend or fast:
        _require_lifecycle(path, "--backend" if backend else "--fast")
    overrides = list(sets or [])
    overrides += [f"run.backend={resolve_backend(backend)}"] if backend else []
    overrides += ["run.reproducible=false"] if fast else []
    config = read_study(path, registries(), overrides)
    if isinstance(config, SweepConfig):
        check_cells(config.cells())
    folder = out or _default_out(path, overrides)
    try:
        with SweepProgress() as progress:
            outcome = run_sweep(config, out=folder, workers=workers, extend=extend, progress=progress)
    except KeyboardInterrupt:
        print(f"qsim: stopped; what is finished stays in {folder}, call again to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    rows = [(f.cell, f.record) for f in outcome.finished]
    products = write_products(rows, folder, title=config.title or path.stem, kind=outcome.kind)
    _show_table(rows, outcome.kind)  # after the files: a closed pipe loses nothing
    print(products)
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


def _require_lifecycle(path: Path, option: str) -> None:
    """Refuse an option that means nothing to the study: it would be a false promise."""
    from qsim.sweep.config import study_kind
    from qsim.sweep.kinds import LIFECYCLE

    if (kind := study_kind(path)) != LIFECYCLE.name:
        raise typer.BadParameter(
            f"{path} is of kind {kind}: only a {LIFECYCLE.name} study chooses its arithmetic; leave {option} out",
            param_hint=option,
        )


def _show_table(rows: Rows, kind: Kind) -> None:
    from qsim.report.products import REPORTS

    console, report = _console(), REPORTS[kind.name]
    for table in report.tables(rows, width=console.width):
        console.print(table, "")
    for line in report.notes(rows):
        console.print(line)


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
