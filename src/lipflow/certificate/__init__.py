"""Certificates: labels and radii of images, and the files that `lipflow.check` verifies."""

from lipflow.certificate.certify import CHUNK_IMAGES, certify
from lipflow.certificate.file import CLAIMS, ROWS, WEIGHTS, CertificateFile, load, save
from lipflow.certificate.rule import Certificates, from_logits, require_pixels

__all__ = [
    "CHUNK_IMAGES",
    "CLAIMS",
    "ROWS",
    "WEIGHTS",
    "CertificateFile",
    "Certificates",
    "certify",
    "from_logits",
    "load",
    "require_pixels",
    "save",
]
