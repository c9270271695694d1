"""Commands that show what there is and what works here. They change nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from qsim.cli.app import JsonFlag, app, console, print_json
from qsim.errors import UsageError


@app.command()
def demo() -> None:
    """Tell the article's story in three rows; under ten seconds, writes no file."""
    from qsim.report.demo import LAYERS, REPLICAS, STEPS, demo_rows, demo_table

    out = console()
    rows = demo_rows()
    out.print(demo_table(rows))
    out.print(
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
        print_json(formats_data())
        return
    out = console()
    for table in formats_tables():
        out.print(table, "")


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
        print_json({"codecs": bench_data(codecs), "products": product_data(products)})
        return
    out = console()
    if codecs:
        out.print(bench_table(codecs), "")
        for note in bench_notes(codecs):
            out.print(note)
    if products:
        out.print(*([""] if codecs else []), product_table(products))
        out.print("floor, for the default side: GMAC/s of a model, else speed over the peer. '!': below it.")


@app.command()
def doctor(json: JsonFlag = False) -> None:
    """Say what works on this machine, and of what does not, why."""
    from qsim.report.doctor import doctor_data, doctor_table, findings

    if json:
        data = doctor_data()
        print_json(data)
        works = bool(data["works"])
    else:
        found = findings()
        console().print(doctor_table(found))
        works = all(f.fine for f in found if f.needed)
    if not works:
        raise typer.Exit(1)
