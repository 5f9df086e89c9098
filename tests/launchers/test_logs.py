import os
from pathlib import Path

from kvflow.launchers.logs import open_log, tail


def test_tail_leaves_out_what_says_nothing(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(
        b"\x1b[1;36m(EngineCore pid=1)\x1b[0;0m INFO loading\r\n"
        b"\n   \n"
        b"Loading:   0%|          | 0/2\rLoading: 100%|####| 2/2\n"
        b"10 of 20\r20 of 20\n"
        b"\xff ValueError: no"
    )
    assert tail(log, 10) == ["(EngineCore pid=1) INFO loading", "20 of 20", "\ufffd ValueError: no"]


def test_tail_is_the_end_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert tail(log, 2) == ["line 99998", "line 99999"]


def test_tail_of_no_log(tmp_path: Path) -> None:
    assert tail(tmp_path / "none.log", 3) == []


def test_a_log_survives_being_emptied_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    fd = open_log(log)
    os.write(fd, b"before\n")
    os.truncate(log, 0)
    os.write(fd, b"after\n")
    os.close(fd)
    assert log.read_bytes() == b"after\n"
