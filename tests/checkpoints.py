"""Checkpoints without tensors, for tests of their folders and metadata."""

from plait.checkpoint.format import FORMAT, LATEST, MANIFEST, MANIFEST_HASH, Manifest, Pointer
from plait.hashing import sha256_of


def put(folder, tag, metadata, *, sequence=1, named=True):
    """Write and return `folder/tag`. If `named`, LATEST points to it."""
    path = folder / tag
    path.mkdir(parents=True)
    text = Manifest(
        format=FORMAT,
        tag=tag,
        sequence=sequence,
        degrees={"pp": 1},
        ranks=(),
        content="",
        own_content="",
        metadata=metadata,
    ).model_dump_json()
    (path / MANIFEST).write_text(text)
    (path / MANIFEST_HASH).write_text(sha256_of(text))
    if named:
        (folder / LATEST).write_text(
            Pointer(tag=tag, manifest_sha256=sha256_of(text)).model_dump_json()
        )
    return path
