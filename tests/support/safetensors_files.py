"""Reads and writes whole safetensors files, with nothing that Python has not."""

import json
import struct


def read_tensors(path):
    """Of one file: name to (dtype, shape, bytes)."""
    contents = path.read_bytes()
    length = struct.unpack("<Q", contents[:8])[0]
    header = json.loads(contents[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"],
                   contents[8 + length:][slice(*entry["data_offsets"])])
            for name, entry in header.items()}


def write_tensors(path, tensors):
    """What read_tensors() gives."""
    header, offset, data = {}, 0, b""
    for name, (dtype, shape, contents) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [offset, offset + len(contents)]}
        offset += len(contents)
        data += contents
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_zeros(path, shapes):
    """F32 tensors of zeros, names to shapes; they take no space on the disk."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
