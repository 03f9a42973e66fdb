"""An export in an object store looks whole only when it is."""

from __future__ import annotations

import pathlib

import pytest

from polyreme_api.store import Data, StoreFailedError
from polyreme_datahub.local_objects import LocalObjectStore
from polyreme_trainer.export import stored
from polyreme_trainer.export.stored import StoredExport

FILES = {
    "config.json": b"{}",
    "model.safetensors.index.json": b"index",
    "model-00001-of-00001.safetensors": b"0123456789",
    "tokenizer.json": b"",
    "text/config.json": b"{}",
    "text/model-00001-of-00001.safetensors": b"01234",
}


class Dying(LocalObjectStore):
    """A store whose client is killed after some requests."""

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__(root, sleep=lambda _: None)
        self.left = 1_000

    def put(self, key: str, data: Data) -> None:
        self._one_request()
        super().put(key, data)

    def delete(self, key: str) -> None:
        self._one_request()
        super().delete(key)

    def _one_request(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StoreFailedError("killed")


def contents(store: LocalObjectStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list("")}


def folder_of(path: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def test_adapters_replace_a_model_and_the_reverse(tmp_path: pathlib.Path) -> None:
    store, place = LocalObjectStore(tmp_path / "store", sleep=lambda _: None), "s3://bucket/model"
    adapters = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"01"}
    for number, files in enumerate((FILES, adapters, FILES)):
        StoredExport(store, place).upload(folder_of(tmp_path / str(number), files))
        assert contents(store) == files


def test_killed_after_any_request_no_half_export_has_a_config_and_the_next_upload_is_whole(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "PART_BYTES", 4)
    earlier = folder_of(tmp_path / "earlier", {**FILES, "model-00002-of-00002.safetensors": b"old"})
    newer = folder_of(tmp_path / "newer", FILES)
    requests = len(FILES) + 1 + len(FILES)
    for killed_after in range(requests + 1):
        store = Dying(tmp_path / f"store-{killed_after}")
        store.put("notes.txt", b"not of an export")
        StoredExport(store, "s3://bucket/model").upload(earlier)
        store.left = killed_after
        if killed_after < requests:
            with pytest.raises(StoreFailedError):
                StoredExport(store, "s3://bucket/model").upload(newer)
            left = contents(store)
            assert "config.json" not in left or killed_after == 0
            store.left = 1_000
            StoredExport(store, "s3://bucket/model").upload(newer)
        else:
            StoredExport(store, "s3://bucket/model").upload(newer)
        assert contents(store) == {**FILES, "notes.txt": b"not of an export"}
