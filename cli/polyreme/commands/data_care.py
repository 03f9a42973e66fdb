"""``polyreme data``: replay of dead letters, garbage collection, a lost registry, links to blobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyreme.commands.data_values import data_home, plain
from polyreme.views.formatting import size
from polyreme.views.output import Format, OutputOption, confirm, emit, lines, note
from polyreme.views.spinner import busy
from polyreme_api.errors import DataDamagedError
from polyreme_datahub.hub import link as link_to
from polyreme_datahub.hub import replay as replay_letters
from polyreme_datahub.lifecycle import collect_garbage
from polyreme_datahub.lifecycle import rebuild_registry as rebuild

DAY_S = 86_400
HOUR_S = 3600
LINK_HOURS_MAX = 7 * 24


def replay(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="NAME, NAME@VERSION or NAME@TAG.")],
    operation: Annotated[str | None, typer.Option(help="Only dead letters of this operation.")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Delete dead letters, so that the next ingest or job tries their records again.

    Use it after an operation was fixed. A version that a recipe made stays as it is: ingesting again makes the next.

    Examples:

      polyreme data replay receipts

      polyreme data replay receipts --operation decode
    """
    home = data_home(context)
    report = replay_letters(home.registry_url, name, operation)
    row = plain(report)
    columns = lines("reference:dataset", "source", "records", "indexes")
    emit("ReplayReport", row, output=output, columns=columns)
    if report.records:
        note(f"{report.records:,} records are tried again by the next polyreme data ingest or polyreme run")
    else:
        note(f"{report.reference} has no dead letters" + (f" of {operation}" if operation else ""))


def gc(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count objects and bytes only.")] = False,
    grace_days: Annotated[float, typer.Option(help="Days between condemning and deleting.", min=0.0)] = 7.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Delete stored data that no dataset and no job reaches: objects are condemned, and deleted after a grace period.

    Examples:

      polyreme data gc --dry-run

      polyreme data gc --yes
    """
    home = data_home(context)
    if not dry_run:
        confirm("condemn and delete stored data that nothing reaches?", yes=yes)
    report = collect_garbage(home.registry_url, home.objects_url, grace_s=grace_days * DAY_S, dry_run=dry_run)
    row: dict[str, Any] = {"number": report.number, "dryRun": report.dry_run}
    counts = ("kept", "condemned", "revived", "deleted")
    for one in counts:
        objects, size_bytes = getattr(report, one)
        row |= {one: {"objects": objects, "bytes": size_bytes}}
    if output is Format.JSON:
        emit("CollectionReport", row, output=output)
        return
    words = {one: f"{getattr(report, one)[0]:,} objects, {size(getattr(report, one)[1])}" for one in counts}
    emit("CollectionReport", words, output=output, columns=lines(*counts))


def rebuild_registry(context: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """Restore a lost registry from the object store: all versions, their samples, and what operations made of them.

    What the registry has already stays; the same command may be repeated. Tags, statistics and dead letters lie only in
    the registry. Exit code 8 if objects could not be read as what they should be; all others are restored.

    Example: POLYREME_DATABASE_URL=postgresql+psycopg2://db/empty polyreme data rebuild-registry
    """
    home = data_home(context)
    with busy("reading the object store"):
        report = rebuild(home.registry_url, home.objects_url)
    columns = lines("versions", "samples", "artifacts", "actions")
    emit("RebuildReport", plain(report), output=output, columns=columns)
    for reference in report.unsealed:
        note(f"{reference}: not all of its samples are listed; polyreme data ingest or polyreme run reads the rest")
    for damage in report.damaged:
        note(f"not restored: {damage}")
    if report.damaged:
        raise DataDamagedError(
            f"{len(report.damaged)} objects of {home.objects_url} could not be restored; restore them from a copy of "
            "the object store and repeat the command",
            field="POLYREME_OBJECTS_URL",
        )


def link(
    context: typer.Context,
    digest: Annotated[str, typer.Argument(help="Digest of a blob: a manifest, a shard, a tokenizer.")],
    hours: Annotated[float, typer.Option(help="Life of the link.", max=LINK_HOURS_MAX)] = 1.0,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create a link with which anyone can read one blob of a bucket for some hours, without credentials.

    Example: polyreme data link 4533204572288a8cdb4e989d2435effb065864214c7a381cf788f4c762cdc865 --hours 24
    """
    url = link_to(data_home(context).objects_url, digest, seconds=round(hours * HOUR_S))
    emit("BlobLink", {"digest": digest, "url": url}, output=output, columns=lines("url"))
