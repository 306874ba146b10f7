"""The words for engines, ghosts, GPUs and reductions in commands, requests and manifests."""

from __future__ import annotations

from typing import Literal, get_args

GpuChoice = Literal["auto", "nvidia", "emulated"]
GpuKind = Literal["nvidia", "emulated"]
GhostChoice = Literal["auto", "warm"]
EngineChoice = Literal["auto", "native", "replay"]
FilesChoice = Literal["truncate", "refuse"]
TcpChoice = Literal["job", "close"]
ModeChoice = Literal["any", "cow", "recopy", "stop"]
CommunicatorsChoice = Literal["keep", "rebuild"]

GPU_CHOICES: tuple[GpuChoice, ...] = get_args(GpuChoice)
GHOST_CHOICES: tuple[GhostChoice, ...] = get_args(GhostChoice)
ENGINE_CHOICES: tuple[EngineChoice, ...] = get_args(EngineChoice)
FILES_CHOICES: tuple[FilesChoice, ...] = get_args(FilesChoice)
TCP_CHOICES: tuple[TcpChoice, ...] = get_args(TcpChoice)
COMMUNICATORS_CHOICES: tuple[CommunicatorsChoice, ...] = get_args(CommunicatorsChoice)
MODE_CHOICES: tuple[ModeChoice, ...] = get_args(ModeChoice)
"""How long a job stands still.

- cow: until copies are made of what it may change. A job that ends is never copied for it.
- recopy: until what it has changed since a first copy is out.
- stop: until all its bytes are out.
- any: the shorter of cow and stop that can be.
"""

GPU_KINDS = (*get_args(GpuKind), "none")
ENGINES = ("native", "replay", "none")
GHOSTS = ("cold", "warm", "late", "none")
"""These three are what an image was made with; `none` is that of a job without tasks."""

UNTRIED = ("mig",)
"""What no real GPU has shown yet, and is refused where a user does not ask to try it."""

REDUCTIONS = ("active", "zero", "dedup")
"""What is left out of an image: chunks not in use, chunks of zeros, all but one of equal chunks."""

GPU_STAGES = ("reserved", "active", "nonzero", "distinct", "stored")
"""Stages of GPU data: all of it, and what is left after each reduction."""
