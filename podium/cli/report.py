"""`podium report`: write the page of a comparison, a study or a sweep again, or compare two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from podium.cli.options import options
from podium.cli.output import Output, wrapped
from podium.errors import as_request

if TYPE_CHECKING:
    from podium.lab.report.versus import Versus


@click.command(short_help="Write a report again, or compare two sets of results.")
@click.argument("folders", metavar="DIR [DIR]", nargs=-1, required=True)
@click.option("--out", metavar="DIR", help="Of two: where versus.html is written. [the second DIR]")
@click.option("--figures", is_flag=True, help="Also write every figure as SVG and PDF into DIR/figures.")
@click.option("--markdown", is_flag=True, help="Also write DIR/README.md, a summary for a repository.")
@click.option(
    "--check", is_flag=True, help="Open the page in Chromium (podium[check]); exit 1 where something is wrong."
)
@click.option("--maximize/--minimize", default=None, help="Which way the metric is better. [as the study says]")
@options("json")
@click.pass_obj
def report(
    out_: Output,
    /,
    folders: tuple[str, ...],
    out: str | None,
    figures: bool,
    markdown: bool,
    check: bool,
    maximize: bool | None,
) -> int:
    """Write report.html again from the results in DIR, the folder of a comparison, a study or a sweep.

    A page of Markdown instead of a folder becomes an HTML file beside it, figures and all.

    With two folders of comparisons or studies: print what changed from the first to the second, cell by cell, and write
    that as a page.

    \b
    podium report runs/compare-digits-mlp-20261115-093836-7d01b9 \\
        --figures --markdown
    podium report runs/monday runs/tuesday
    """
    if len(folders) > 2:
        raise click.UsageError(f"report: takes one folder or two, got {len(folders)}")
    if len(folders) == 2:
        if figures or markdown:
            raise click.UsageError("report: --figures and --markdown are for one folder, got two")
        with as_request():
            document, said = _two(folders[0], folders[1], out, maximize)
    else:
        if out is not None:
            raise click.UsageError("report: --out is for two folders; one has its page beside its results")
        with as_request():
            document, said = _one(folders[0], figures=figures, markdown=markdown, maximize=maximize)
    if check:
        from podium.lab.report.browser import check_report

        document["problems"] = check_report(document["report"])
        said += [f"problem: {text}" for text in document["problems"]] or ["check: nothing wrong in a browser"]
    out_.document(document)
    out_.say(*said)
    return 1 if document.get("problems") else 0


def _one(folder: str, *, figures: bool, markdown: bool, maximize: bool | None) -> tuple[dict[str, Any], list[str]]:
    """Write one folder's report and the requested files; returns their paths as a document and as lines."""
    from pathlib import Path

    is_page, is_sweep = folder.endswith(".md"), (Path(folder) / "trials.jsonl").is_file()
    if (is_page or is_sweep) and (figures or markdown or maximize is not None):
        asked = "--figures, --markdown, --maximize and --minimize"
        kind = "page" if is_page else "sweep"
        raise click.UsageError(f"report: {asked} are for comparisons and studies, got a {kind}")
    if is_page:
        from podium.lab.report.html import write_html

        path = str(write_html(folder))
        return {"report": path}, [f"report: {path}"]
    if is_sweep:
        from podium.lab.sweeps import write_all

        path = write_all(folder).report
        return {"report": path}, [f"report: {path}"]
    from podium.lab.report.report import write_report
    from podium.lab.report.study_results import StudyResults

    results = StudyResults.read(folder, maximize)
    document: dict[str, Any] = {"report": str(write_report(results))}
    said = [f"report: {document['report']}"]
    if figures:
        from podium.lab.report.drawing.files import write_figures

        written = write_figures(results)
        document["figures"] = [str(path) for path in written]
        said.append(f"figures: {len(written)} files in {Path(folder) / 'figures'}")
    if markdown:
        from podium.lab.report.page import write_page

        document["page"] = str(write_page(results))
        said.append(f"page: {document['page']}")
    return document, said


def _two(first: str, second: str, out: str | None, maximize: bool | None) -> tuple[dict[str, Any], list[str]]:
    from podium.lab.report.versus import write_versus

    found, path = write_versus(first, second, out, maximize=maximize)
    return {**found.to_dict(), "report": str(path)}, [*describe(found), "", f"report: {path}"]


def describe(found: Versus) -> list[str]:
    """The answer with its limits, then the numbers."""
    from podium.lab.report.versus import lines

    return [wrapped(found.answer), "", wrapped(found.limits), "", *lines(found)]
