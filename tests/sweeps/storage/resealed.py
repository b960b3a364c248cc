"""What a store holds, changed by a hand that knows its checksums."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from conewise.jobs import store


def body_of(path: Path, table: str, column: str) -> str:
    """The text that the first row of a table has in a column."""
    with sqlite3.connect(path) as connection:
        ((body,),) = connection.execute(f"SELECT {column} FROM {table} LIMIT 1")
    connection.close()
    return str(body)


def reseal(path: Path, table: str, column: str, text: str) -> None:
    """Put a text into a column, in every row of a table, and make all checksums fit."""
    with sqlite3.connect(path) as connection:
        connection.create_function("checksum", -1, store._checksum)
        connection.execute(f"UPDATE {table} SET {column} = ?", (text,))
        connection.execute("UPDATE manifest SET checksum = checksum('manifest', body)")
        of = "(SELECT checksum FROM manifest)"
        connection.execute(f"UPDATE plans SET checksum = checksum({of}, 'plan', batch, body)")
        connection.execute(
            f"UPDATE chunks SET checksum = checksum({of}, 'chunk', batch, piece, shape, numbers)"
        )
    connection.close()
