"""Certificates on disk, honest ones and forged ones with digests that fit."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

import lipflow
from lipflow import check
from lipflow.certificate import file as certificate_file
from lipflow.graph.file import describe

Claims = dict[str, Any]
Description = dict[str, Any]
Tensors = dict[str, np.ndarray]
Forgery = Callable[[Description, Tensors, Claims], Any]  # it changes what it is given


def certificate(folder: Path, frozen: lipflow.Frozen, images: Tensor) -> lipflow.Certificates:
    """Write the honest certificate of some images."""
    certificates = lipflow.certify(frozen, images)
    certificate_file.save(folder, frozen, certificates, images, certificates.label)
    return certificates


def claims_of(folder: Path) -> Claims:
    return json.loads((folder / certificate_file.CLAIMS).read_text())


def sign(folder: Path, claims: Claims) -> None:
    """Write claims with digests that fit."""
    claims.pop("digest", None)
    names = certificate_file.WEIGHTS, certificate_file.ROWS
    claims["files"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}
    (folder / certificate_file.CLAIMS).write_text(json.dumps(dict(claims, digest=certificate_file.digest(claims))))


def forge(folder: Path, frozen: lipflow.Frozen, change: Forgery) -> None:
    """Change what the certificate of a network in a folder says, and sign it."""
    description, _ = describe(frozen.graph, frozen.domain)
    description, claims = json.loads(json.dumps(description)), claims_of(folder)
    tensors = load_file(folder / certificate_file.WEIGHTS)
    change(description, tensors, claims)
    save_file(tensors, folder / certificate_file.WEIGHTS, {"lipflow": json.dumps(description)})
    sign(folder, claims)


def rejected(folder: Path) -> str:
    """Why the checker rejects a folder; nothing if it does not."""
    try:
        check.check(folder, full=True)
    except check.Rejected as reason:
        return str(reason)
    return ""


def bytes_of(frozen: lipflow.Frozen, count: int, seed: int = 1) -> Tensor:
    """Random images as bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, *frozen.in_shape), generator=generator).to(torch.uint8)
