"""Systolic arrays: exact cycles, real products stepped cycle by cycle, and SCALE-Sim's files in and out."""

from twofour.hardware.systolic.array import DATAFLOWS, SystolicArray, cycles, utilisation
from twofour.hardware.systolic.layer import Layer
from twofour.hardware.systolic.reports import write_reports
from twofour.hardware.systolic.settings import Settings, read_settings
from twofour.hardware.systolic.simulate import Simulated, simulate, simulated
from twofour.hardware.systolic.stepped import Stepped, step
from twofour.hardware.systolic.stepped_layer import SteppedLayer, step_layer
from twofour.hardware.systolic.topology import read_topology
from twofour.hardware.systolic.weights import Kept, keep

__all__ = [
    "DATAFLOWS",
    "Kept",
    "Layer",
    "Settings",
    "Simulated",
    "Stepped",
    "SteppedLayer",
    "SystolicArray",
    "cycles",
    "keep",
    "read_settings",
    "read_topology",
    "simulate",
    "simulated",
    "step",
    "step_layer",
    "utilisation",
    "write_reports",
]
