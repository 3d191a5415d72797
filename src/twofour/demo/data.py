"""The demo's real data: scikit-learn's handwritten digits, or Fashion-MNIST from a folder of IDX files."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twofour.errors import DataError, absent, integer_from, one_of

FOLDER_VARIABLE = "TWOFOUR_DATA"
UNSIGNED_BYTE = 0x08  # the IDX type code of all MNIST-like files
LARGEST = 1 << 30


@dataclass(frozen=True)
class Images:
    """Labelled square images, split once and for all.

    Attributes:
        name: Name of the data set.
        train: Training images, float32 (n, side, side), mean 0 and deviation 1 over the training set.
        train_labels: Their classes, int64 (n,).
        test: Held-out images, normalised with the training set's figures.
        test_labels: Their classes.
        classes: Number of classes.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: int

    @property
    def side(self) -> int:
        """Pixels along one side."""
        return self.train.shape[-1]


def load(name: str, *, train: int, test: int, seed: int = 0) -> Images:
    """Load a data set by name, at most `train` and `test` images of it, chosen by `seed`.

    Raises:
        DataError: The name is unknown, or the data is missing or malformed.
    """
    integer_from(-(2**63), "the seed is impossible", DataError, "leave it out for 0", 2**64 - 1, seed=seed)
    known = {"digits": _digits, "fashion-mnist": _fashion_mnist}
    one_of("the demo does not know this data", name, known, DataError)
    return known[name](train, test, seed)


def data_folder() -> Path:
    """The folder of data sets: $TWOFOUR_DATA, else shared/data beside the checkout or beside the current folder.

    Raises:
        DataError: There is none.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    checkout = Path(__file__).resolve().parents[3]
    places = [Path(given)] if given else [root / "shared" / "data" for root in (checkout.parent, Path.cwd().parent)]
    for place in places:
        if place.is_dir():
            return place
    raise DataError(
        "there is no folder of data sets",
        got=", ".join(map(str, places)),
        wanted="a folder with fashion-mnist/train-images-idx3-ubyte.gz and so on",
        remedy=f"set {FOLDER_VARIABLE} to it, or use the digits, which come with scikit-learn",
    )


def read_idx(path: Path) -> np.ndarray:
    """Read a gzip-compressed IDX file of unsigned bytes: two zero bytes, type, number of axes, sizes, data.

    Returns:
        uint8 array of the shape in the header.

    Raises:
        DataError: The file is missing, truncated, too long, or of another type.
    """
    try:
        with gzip.open(path) as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != bytes((0, 0, UNSIGNED_BYTE)) or not 1 <= head[3] <= 3:
                raise _bad_idx(path, f"it starts with {head.hex() or 'nothing'}")
            axes = head[3]
            sizes = file.read(4 * axes)
            shape = struct.unpack(f">{axes}I", sizes) if len(sizes) == 4 * axes else ()
            count = math.prod(shape) if shape else 0
            if not 0 < count <= LARGEST:
                raise _bad_idx(path, f"sizes {shape}")
            content = file.read(count + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad_idx(path, f"{type(error).__name__}: {error}") from error
    if len(content) != count:
        raise _bad_idx(path, f"{'more' if len(content) > count else len(content)} bytes for the sizes {shape}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _digits(train: int, test: int, seed: int) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        what = "the handwritten digits come with scikit-learn, which is not installed"
        raise absent(DataError, what, error, "the package scikit-learn", "demo") from error
    pixels, target = load_digits(return_X_y=True)
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed), device="cpu")
    held, used = order[:test], order[test : test + train]
    images, labels = torch.from_numpy(pixels).float().unflatten(1, (8, 8)), torch.from_numpy(target).long()
    return _normalised("digits", images[used], labels[used], images[held], labels[held])


def _fashion_mnist(train: int, test: int, seed: int) -> Images:
    folder = data_folder() / "fashion-mnist"
    parts = []
    for part, count in (("train", train), ("t10k", test)):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")
        if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max() > 9:
            raise DataError(
                f"{folder} does not hold Fashion-MNIST",
                got=f"{part}: images {images.shape}, labels {labels.shape} up to {labels.max()}",
                wanted="images (n, 28, 28), labels (n,) from 0 to 9",
            )
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed), device="cpu")[:count].numpy()
        parts += [torch.from_numpy(images[order]).float(), torch.from_numpy(labels[order]).long()]
    return _normalised("fashion-mnist", *parts)


def _normalised(name: str, train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> Images:
    mean, deviation = train.mean(), train.std()
    scaled = ((train - mean) / deviation, (test - mean) / deviation)
    return Images(name, scaled[0], train_labels, scaled[1], test_labels, int(train_labels.max()) + 1)


def _bad_idx(path: Path, got: str) -> DataError:
    return DataError(
        f"{path} cannot be read as an IDX file",
        got=got,
        wanted="gzip-compressed IDX data of unsigned bytes, as MNIST and Fashion-MNIST are published",
        remedy="fetch the file again",
    )
