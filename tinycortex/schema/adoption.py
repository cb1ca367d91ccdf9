"""What the revisions are made of: create a table, or adopt the one that another program made.

Online, the database is asked what is there. Offline (``--sql``) nothing can be asked, so the script
creates with IF NOT EXISTS and suits an empty database.
"""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from alembic import op
from alembic.operations.ops import (
    AddColumnOp,
    AlterColumnOp,
    CreateIndexOp,
    CreateTableOp,
    DropIndexOp,
    MigrateOperation,
    OpContainer,
)

from tinycortex.dialects import Dialect, dialect_for
from tinycortex.errors import SchemaError


def create_or_adopt(table: str, *items: sa.schema.SchemaItem) -> None:
    """Create ``table``, or add to the one that is there the columns that it lacks. No row is touched."""
    op.create_table(table, *items, if_not_exists=True)
    add_missing_columns(table, *[item for item in items if isinstance(item, sa.Column)])


def add_missing_columns(table: str, *columns: sa.Column[object]) -> None:
    """Add those of ``columns`` that ``table`` lacks; offline, none (``create_or_adopt`` has made them)."""
    if _offline():
        return
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
    for column in columns:
        if column.name in present:
            continue
        if column.primary_key or (not column.nullable and column.server_default is None):
            raise SchemaError(
                f"table {table} exists without its column {column.name}, which has no default; "
                "it is not a table of this contract, so move it away or use another database"
            )
        op.add_column(table, column)


def add_columns(table: str, *columns: sa.Column[object]) -> None:
    """Add ``columns``, less those that another program has added already."""
    if _offline():
        for column in columns:
            op.add_column(table, column)
    else:
        add_missing_columns(table, *columns)


def ensure_index(
    name: str, table: str, columns: Sequence[str], *, unique: bool = False, where: str | None = None
) -> None:
    """Create an index; one of that name with another meaning is made anew.

    Raises:
        SchemaError: rows that are there break the uniqueness.
    """
    if not _offline() and find_index_fault(op.get_bind(), name, table, columns, unique=unique, where=where):
        op.drop_index(name, table, if_exists=True)
    predicate = None if where is None else sa.text(where)
    try:
        op.create_index(
            name,
            table,
            list(columns),
            unique=unique,
            if_not_exists=True,
            sqlite_where=predicate,
            postgresql_where=predicate,
        )
    except sa.exc.IntegrityError as error:
        raise SchemaError(
            f"index {name} cannot be made: several rows of {table} share one ({', '.join(columns)})"
            f"{'' if where is None else f' WHERE {where}'}; settle or delete all but one of each"
        ) from error


def overlook_null_keys(found: OpContainer, metadata: sa.MetaData) -> None:
    """Drop from ``found`` the one difference that no migration can mend.

    ``id TEXT PRIMARY KEY``, as the contract and other programs write it, may be null in SQLite, and SQLite
    can change that only by rebuilding the table.
    """
    kept: list[MigrateOperation] = []
    for operation in found.ops:
        if isinstance(operation, OpContainer):
            overlook_null_keys(operation, metadata)
            kept += [operation] if operation.ops else []
            continue
        if isinstance(operation, AlterColumnOp):
            column = metadata.tables[operation.table_name].columns[operation.column_name]
            if column.primary_key:
                operation.modify_nullable = None
                if not operation.has_changes():
                    continue
        kept.append(operation)
    found.ops = kept


def describe(found: OpContainer) -> list[str]:
    """Return what ``found`` would change, a line each, less indexes: :func:`find_index_faults` tells of those."""
    lines = []
    for operation in found.ops:
        if isinstance(operation, OpContainer):
            lines += describe(operation)
        elif isinstance(operation, CreateTableOp):
            lines.append(f"table {operation.table_name} is missing")
        elif isinstance(operation, AddColumnOp):
            lines.append(f"column {operation.column.name} of {operation.table_name} is missing")
        elif not isinstance(operation, CreateIndexOp | DropIndexOp):
            lines.append(repr(operation.to_diff_tuple()))
    return lines


def find_index_faults(connection: sa.Connection, metadata: sa.MetaData) -> list[str]:
    """Return where an index of ``metadata`` means something else in the database, predicates included."""
    faults = []
    present = sa.inspect(connection).get_table_names()
    for table in metadata.sorted_tables:
        if table.name not in present:
            continue
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            where = _where(index.dialect_kwargs)
            fault = find_index_fault(
                connection,
                str(index.name),
                table.name,
                [column.name for column in index.columns],
                unique=bool(index.unique),
                where=None if where is None else str(where),
            )
            faults += [fault] if fault else []
    return faults


def find_index_fault(
    connection: sa.Connection,
    name: str,
    table: str,
    columns: Sequence[str],
    *,
    unique: bool,
    where: str | None,
) -> str | None:
    """Return what is wrong with one index, or None. Autogenerate would not see a differing predicate."""
    found = next((index for index in sa.inspect(connection).get_indexes(table) if index["name"] == name), None)
    if found is None:
        return f"index {name} is missing"
    stored = _where(found.get("dialect_options", {}))
    dialect = dialect_for(connection.engine.url)
    meaning = (list(found["column_names"]), bool(found["unique"]), _normal(stored, dialect))
    wanted = (list(columns), unique, _normal(where, dialect))
    return None if meaning == wanted else f"index {name} is {meaning}, not {wanted}"


def _where(options: Mapping[str, object]) -> object:
    # Every engine has its own name for it, and our models give all of them one predicate.
    return next((value for name, value in options.items() if name.endswith("_where")), None)


def _normal(predicate: object, dialect: Dialect) -> str:
    return "" if predicate is None else "".join(dialect.plain_predicate(str(predicate)).lower().split())


def _offline() -> bool:
    return op.get_context().as_sql
