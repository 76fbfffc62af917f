"""Mutations, each a function of a seed: of bytes, of tables of values, of archives and HDF5 files.

The same seed gives the same mutation, so that a failing case can be repeated by its number.
"""

import io
import json
import os
import tarfile
import warnings
import zipfile

NUMBERS = (0, 1, 255, 1000, 2**20, 2**30, 2**31 - 1, 2**40, 2**62, -1, -8)
NAMES = ("../x", "/x", "..", ".", "", "a/b", "a\0b", "\x1b[2J", "\ud800", "é" * 300, "x" * 5000)
"""Of files, clients, arrays: those that lead elsewhere, can't be printed, or are long."""
VALUES = (
    *(None, True, False, -1, 0, 3, 2.5, -0.0, 1e308, float("nan"), float("inf"), 10**400, 2**63),
    *([], {}, "text", ["a"], [1, "a"], {"a": 1}, [[]], "5", "0"),
    *NAMES,
)
LARGE = 2**28 + 1
"""Bytes of a bomb: more than an archive may always become."""
DEEP = 100_000
"""Levels of nested lists, on which parsers run out of stack."""


def change_bytes(content, draw):
    """Bytes changed, cut, zeroed, copied, put between, or made numbers that are much."""
    data = bytearray(content)
    how = draw.choice(["byte", "bit", "cut", "zero", "copy", "between", "number", "number"])
    if how == "cut":
        return bytes(data[: draw.randrange(len(data))])
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, size = draw.randrange(len(data)), draw.choice([1, 4, 8, 64, 512])
        if how == "byte":
            data[at] = draw.randrange(256)
        elif how == "bit":
            data[at] ^= 1 << draw.randrange(8)
        elif how == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif how == "copy":
            begin = draw.randrange(len(data))
            data[at : at + size] = data[begin : begin + size]
        elif how == "between":
            data[at:at] = bytes([draw.randrange(256)])
        else:
            number = draw.choice(NUMBERS) % 2**64
            data[at - at % 4 : at - at % 4 + 8] = number.to_bytes(8, "little")
    return bytes(data)


def list_places(value, place=()):
    """Every place of a value of dicts and lists, as the keys that lead there."""
    yield place
    parts = value.items() if isinstance(value, dict) else []
    for name, part in [*parts, *(enumerate(value) if isinstance(value, list) else [])]:
        yield from list_places(part, (*place, name))


def change_value(value, draw):
    """A copy with one place of another value, without it, twice, or under another name."""
    place = draw.choice(list(list_places(value)))
    how = draw.choice(["value", "value", "value", "leave out", "twice", "name"])
    if not place:
        return draw.choice(VALUES)
    value = json.loads(json.dumps(value))
    inner = value
    for name in place[:-1]:
        inner = inner[name]
    last = place[-1]
    if how == "value":
        inner[last] = draw.choice(VALUES)
    elif how == "leave out":
        del inner[last]
    elif isinstance(inner, list):
        inner.insert(draw.randrange(len(inner) + 1), inner[last])
    else:
        name = draw.choice(NAMES)
        inner[name] = inner[last] if how == "twice" else inner.pop(last)
    return value


def change_json(content, draw):
    """JSON with a changed value, or nested too deeply."""
    if draw.randrange(50) == 0:
        return b"[" * DEEP
    return json.dumps(change_value(json.loads(content), draw)).encode()


def change_line(content, draw):
    """Lines of JSON of which one is changed, left out, there twice, or in another place."""
    lines = content.splitlines(keepends=True)
    at, how = (
        draw.randrange(len(lines)),
        draw.choice(["value"] * 5 + ["leave out", "twice", "move"]),
    )
    if how == "value":
        lines[at] = change_json(lines[at], draw) + b"\n"
    elif how == "leave out":
        del lines[at]
    else:
        line = lines[at] if how == "twice" else lines.pop(at)
        lines.insert(draw.randrange(len(lines) + 1), line)
    return b"".join(lines)


def change_zip(content, draw):
    """The archive with other names, a member of zeros, a bomb, or a header that lies."""
    with zipfile.ZipFile(io.BytesIO(content)) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    how, at = (
        draw.choice(["name", "twice", "bomb", "header", "pickle"]),
        draw.randrange(len(members)),
    )
    name, data = members[at]
    if how == "name":
        members[at] = (draw.choice([n for n in NAMES if n.isprintable()]) + ".npy", data)
    elif how == "twice":
        members.append(members[at])
    elif how == "bomb":
        members[at] = (name, data[:128] + bytes(2**27))
    elif how == "header":
        shape = draw.choice([b"(2**60,)", b"(99999999999,)", b"(-1,)", b"(1e9,)", b"()" * 3000])
        members[at] = (
            name,
            make_header(b"'descr': '<f4', 'fortran_order': False, 'shape': " + shape),
        )
    else:
        members[at] = (name, make_header(b"'descr': '|O', 'fortran_order': False, 'shape': (1,)"))
    made = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in members:
            with new.open(zipfile.ZipInfo(name), "w") as file:
                file.write(data)
    return made.getvalue()


def make_header(fields):
    """An array of NumPy's format with these fields, and nothing in it."""
    text = b"{" + fields + b"}\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def change_safetensors(content, draw):
    """The file with a header that has other values, for the same bytes."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    changed = change_value(header, draw)
    if draw.randrange(4) == 0 and "__metadata__" in header:  # what the text inside says
        told = header["__metadata__"]
        name = draw.choice([name for name, text in told.items() if text.startswith("{")] or ["x"])
        text = change_json(told.get(name, "{}").encode(), draw).decode()
        changed = header | {"__metadata__": told | {name: text}}
    text = json.dumps(changed).encode()
    length = draw.choice([len(text)] * 9 + [2**62])
    return length.to_bytes(8, "little") + text + content[8 + size :]


def make_archive(draw, inside):
    """A tar with a member that leads out of its directory, is no file, or is much larger.

    inside: name and content of a member that is right.
    """
    made = io.BytesIO()
    suffix = draw.choice(["", "gz"])
    with tarfile.open(fileobj=made, mode=f"w:{suffix}") as tar:
        for _ in range(draw.randrange(1, 4)):
            _add_member(tar, draw)
        name, content = inside
        if draw.randrange(2):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def _add_member(tar, draw):
    name = draw.choice(["../outside", "/tmp/fedpa-outside", "a/../../outside", "set.h5", "x" * 300])
    info = tarfile.TarInfo(name)
    kinds = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.REGTYPE]
    info.type = draw.choice([*kinds, tarfile.REGTYPE])
    info.mode = draw.choice([0o644, 0o7777, 0])
    if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        info.linkname = draw.choice(["../outside", "/etc/passwd", "..", "set.h5", "loop"])
        tar.addfile(info)
    elif info.type == tarfile.REGTYPE:
        content = bytes(draw.choice([3, 2**20, LARGE if draw.randrange(20) == 0 else 3]))
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    else:
        tar.addfile(info)


def change_hdf5(path, draw):
    """The file with a client or a feature that is a link, lies elsewhere, or has another type."""
    import h5py
    import numpy as np

    with h5py.File(path, "a") as file:
        client = draw.choice(list(file["examples"]))
        group = file["examples"][client]
        feature = draw.choice(list(group))
        outside = os.fspath(path.parent / "outside.h5")
        how = draw.randrange(10)
        if how == 0:
            del file["examples"][client]
            file["examples"][client] = h5py.ExternalLink(outside, "/examples/a")
        elif how == 1:
            del group[feature]
            group[feature] = h5py.ExternalLink(outside, "/examples/a/x")
        elif how == 2:
            del group[feature]
            group[feature] = h5py.SoftLink(
                draw.choice(["/examples", "../..", f"/examples/{client}"])
            )
        elif how == 3:
            file["examples"]["circle"] = file["examples"]
        elif how == 4:
            del group[feature]
            group.create_dataset(feature, (10,), "f4", external=[("/etc/passwd", 0, 40)])
        elif how == 5:
            layout = h5py.VirtualLayout(shape=(6,), dtype="f4")
            layout[:] = h5py.VirtualSource(outside, "x", shape=(6,))
            del group[feature]
            group.create_virtual_dataset(feature, layout)
        elif how == 6:
            del group[feature]
            group.create_dataset(feature, (2**40, 3), "f8", chunks=(1, 3))
        elif how == 7:
            del group[feature]
            group.create_dataset(feature, data=np.zeros(2**24), compression="gzip")
        elif how == 8:
            del group[feature]
            group.create_dataset(feature, data=h5py.Empty("f4"))
        else:
            del group[feature]
            kind = draw.choice([np.dtype([("a", "f4")]), h5py.ref_dtype, np.dtype("V5")])
            group.create_dataset(feature, (6,), dtype=kind)
