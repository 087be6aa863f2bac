"""The store: grouping by content, names that are results, copies that are exact, links that are one inode."""

from pathlib import Path

import numpy as np
import pytest
import torch

from eaglet import shard, store
from eaglet.errors import EagletError
from eaglet.rows import Row
from eaglet.shard import Shard
from eaglet.store import Group, Kind, Store

KIND = Kind(model="m" * 64, engine="transformers/bfloat16", codec="rebase-zstd", hidden_size=16)
STREAMS = ["L01", "L02", "L03", "final"]


def make_rows(count: int, seed: int = 0) -> list[Row]:
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        ids = generator.integers(0, 1000, generator.integers(2, 60)).astype(np.int32)
        found.append(Row(f"row-{index}", "test", False, True, ids, np.ones(len(ids), bool), [0]))
    return found


def states_of(sample: str, length: int, stream: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(sample[:8], 16) + STREAMS.index(stream))
    return torch.randn(length, 16, generator=generator).bfloat16()


def fill(states: Store, groups: list[Group]) -> None:
    for item in states.work(groups):
        runs = []
        for sample, length in item.group.samples:
            if sample in item.copies:
                with Shard.open(item.copies[sample]) as opened:
                    runs.append(opened.run(sample))
            else:
                runs.append(shard.pack(states_of(sample, length, item.stream), KIND.codec))
        states.write(item.stream, item.group, runs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_groups_hold_every_row_once_in_order_and_under_the_cap() -> None:
    rows = make_rows(500)
    groups = store.group_rows(rows, 256)
    assert [sample for group in groups for sample, _ in group.samples] == [row.sample for row in rows]
    assert all(group.tokens <= 4 * 256 for group in groups)
    mean = sum(group.tokens for group in groups) / len(groups)
    assert 128 < mean < 512


def test_a_row_longer_than_the_cap_has_a_group() -> None:
    rows = make_rows(3)
    groups = store.group_rows(rows, 1)
    assert [len(group.samples) for group in groups] == [1, 1, 1]


@pytest.mark.parametrize("change", ["insert", "delete", "replace"])
def test_one_changed_row_changes_few_groups(change: str) -> None:
    rows, other = make_rows(500), make_rows(1, seed=9)
    changed = {
        "insert": [*rows[:250], *other, *rows[250:]],
        "delete": rows[:250] + rows[251:],
        "replace": [*rows[:250], *other, *rows[251:]],
    }[change]
    before, after = set(store.group_rows(rows, 256)), set(store.group_rows(changed, 256))
    assert len(after - before) <= 4 < len(after), "the cap may shift a boundary or two until the next cut by hash"


def test_name_follows_from_all_that_determines_the_states() -> None:
    group = Group((("a", 3), ("b", 4)))
    base = Store(KIND, STREAMS).name("L01", group)
    others = [
        Store(KIND, STREAMS).name("L02", group),
        Store(KIND, STREAMS).name("L01", Group((("b", 4), ("a", 3)))),
        Store(Kind("x" * 64, KIND.engine, KIND.codec, 16), STREAMS).name("L01", group),
        Store(Kind(KIND.model, "transformers/float32", KIND.codec, 16), STREAMS).name("L01", group),
        Store(Kind(KIND.model, KIND.engine, "raw", 16), STREAMS).name("L01", group),
    ]
    assert len({base, *others}) == 6
    assert Store(KIND, ["L01"]).name("L01", group) == base, "other layers chosen beside it change nothing"


def test_only_what_is_missing_is_work(folder: Path) -> None:
    rows = make_rows(60)
    states = Store(KIND, STREAMS[:2])
    groups = store.group_rows(rows, 256)
    assert {s for item in states.work(groups) for s in item.compute} == {row.sample for row in rows}
    fill(states, groups)
    assert states.work(groups) == []
    more = list(Store(KIND, STREAMS[:3]).work(groups))
    assert {item.stream for item in more} == {"L03"}
    changed = [*rows[:30], *make_rows(1, seed=5), *rows[31:]]
    work = states.work(store.group_rows(changed, 256))
    assert {s for item in work for s in item.compute} == {changed[30].sample}
    assert {s for item in work for s in item.copies} <= {row.sample for row in rows}


def test_a_shard_with_copies_equals_one_packed_anew(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = make_rows(40)
    changed = [*rows[:20], *make_rows(1, seed=5), *rows[20:]]
    groups = store.group_rows(changed, 256)
    states = Store(KIND, STREAMS)
    fill(states, store.group_rows(rows, 256))
    fill(states, groups)
    grown = {path.name: path.read_bytes() for g in groups for path in [states.path("L02", g)]}
    elsewhere = tmp_path_factory.mktemp("fresh")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        fill(states, groups)
        fresh = {path.name: path.read_bytes() for g in groups for path in [states.path("L02", g)]}
    assert grown == fresh


def test_published_view_is_links_and_reads_back(folder: Path) -> None:
    rows = make_rows(20)
    groups = store.group_rows(rows, 256)
    states = Store(KIND, STREAMS)
    fill(states, groups)
    states.publish(groups, [1, 2, 3])
    stale = Path("data/states/L09/old.safetensors")
    stale.parent.mkdir()
    stale.touch()
    states.publish(groups, [1, 2, 3])
    assert not stale.exists(), "the view holds what the manifest names and nothing else"
    view = store.States()
    assert view.layers == [1, 2, 3]
    for row in rows:
        for stream, values in view.read(row.sample).items():
            assert torch.equal(values, states_of(row.sample, len(row.input_ids), stream))
            path = view.path(row.sample, stream)
            assert path.stat().st_nlink == 2
            assert path.stat().st_mode & 0o777 == 0o444
    with pytest.raises(EagletError, match="no sample"):
        view.read("0" * 32)


def test_a_damaged_shard_is_not_copied_from(folder: Path) -> None:
    rows = make_rows(20)
    states = Store(KIND, ["L01"])
    groups = store.group_rows(rows, 100_000)
    fill(states, groups)
    path = states.path("L01", groups[0])
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    changed = store.group_rows([*rows, *make_rows(1, seed=5)], 100_000)
    work = states.work(changed)
    assert [len(item.compute) for item in work] == [21]


def test_the_store_is_held_by_one(folder: Path) -> None:
    with store.lock(), pytest.raises(EagletError, match="another eaglet process"), store.lock():
        pass
    with store.lock():
        pass


def test_unknown_manifest_format_is_refused(folder: Path) -> None:
    Path("data/states").mkdir(parents=True)
    Path("data/states/manifest.json").write_text('{"format": 99}')
    with pytest.raises(EagletError, match="format 99"):
        store.States()


def test_a_shard_changed_in_place_is_dropped_and_computed_again(folder: Path) -> None:
    rows = make_rows(20)
    groups = store.group_rows(rows, 256)
    states = Store(KIND, ["L01"])
    fill(states, groups)
    path = states.path("L01", groups[0])
    good = path.read_bytes()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([good[-1] ^ 1]))
    changed = store.group_rows(rows[:1] + make_rows(1, seed=7) + rows[1:], 256)
    copied = {copy for item in states.work(changed) for copy in item.copies.values()}
    assert path not in copied, "nothing is copied out of it"
    assert states.drop_damaged(groups) == [path]
    fill(states, groups)
    assert path.read_bytes() == good
    assert states.drop_damaged(groups) == []
