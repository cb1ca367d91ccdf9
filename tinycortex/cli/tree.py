"""``tinycortex tree``: the memory's trees, for a person to look at."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from tinycortex.cli.opening import AsJson, open_cortex
from tinycortex.cli.output import console, plain, print_error, print_json

if TYPE_CHECKING:
    from tinycortex.memory.outline import SummaryOutline, TreeOutline


def tree(
    ctx: typer.Context,
    scope: Annotated[str | None, typer.Argument(help="Only the tree over this scope.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show trees, what waits in them and their summaries, with levels, tokens and first words."""
    from tinycortex.memory.outline import Outline  # noqa: PLC0415 - it brings the memory's tables with it

    with open_cortex(ctx) as cortex:
        trees = Outline(cortex.database).list_trees(scope)
    if scope is not None and not trees:
        print_error(f"there is no tree over {scope!r}; `tinycortex tree` shows those there are")
        raise typer.Exit(1)
    if as_json:
        print_json({"trees": [asdict(outline) for outline in trees]})
        return
    for outline in trees:
        console().print(_rendered(outline))


def _rendered(outline: "TreeOutline") -> Tree:
    rendered = Tree(plain(f"{outline.kind} {outline.scope} ({outline.status})"))
    for buffer in outline.buffers:
        rendered.add(plain(f"level {buffer.level} waits: {buffer.items} items, {buffer.token_sum} tokens"))
    for summary in outline.summaries:
        _add(rendered, summary)
    return rendered


def _add(parent: Tree, summary: "SummaryOutline") -> None:
    head: Text = plain(
        f"level {summary.level}: {summary.token_count} tokens over {summary.leaf_count} chunks: {summary.preview}"
    )
    branch = parent.add(head)
    for child in summary.children:
        _add(branch, child)
