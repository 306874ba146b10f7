"""Molecular dynamics of water with OpenMM: mesh Ewald sums, constraints, a thermostat."""

from __future__ import annotations

import os

# OpenMM loads what lies there when it is imported. Its OpenCL part opens the GPU past CUDA, and
# such a process cannot be dumped.
os.environ["OPENMM_PLUGIN_DIR"] = os.devnull

import openmm
from _common import Report, digest, guarded, parse, verify
from openmm import app, unit

DEFAULT_STEPS = 40
INNER = 50  # steps of the integrator in one of ours
SETTLING = 500  # before the first, with more friction: molecules begin too near to each other
TEMPERATURE = 300.0
TIME_STEP = 0.002  # picoseconds


def water(nanometers: float) -> tuple[openmm.System, list[openmm.Vec3]]:
    """Return a periodic cube of TIP3P water and its atoms' positions."""
    field = app.ForceField("tip3p.xml")
    modeller = app.Modeller(app.Topology(), [] * unit.nanometer)
    modeller.addSolvent(field, boxSize=openmm.Vec3(*[nanometers] * 3) * unit.nanometer)
    system = field.createSystem(
        modeller.topology,
        nonbondedMethod=app.PME,
        nonbondedCutoff=0.9 * unit.nanometer,
        constraints=app.HBonds,
        rigidWater=True,
    )
    return system, modeller.positions


def cuda() -> openmm.Platform:
    """Load OpenMM's CUDA part, and no other."""
    openmm.Platform.loadPluginLibrary(
        f"{openmm.version.openmm_library_path}/plugins/libOpenMMCUDA.so"
    )
    return openmm.Platform.getPlatformByName("CUDA")


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    system, positions = water(7.0 if options.big else 3.0)
    integrator = openmm.LangevinMiddleIntegrator(TEMPERATURE, 20.0, TIME_STEP)
    integrator.setRandomNumberSeed(options.seed + 1)  # 0 would be drawn
    properties = {"DeterministicForces": "true", "Precision": "mixed"}
    properties["DeviceIndex"] = str(options.device)
    context = openmm.Context(system, integrator, cuda(), properties)
    context.setPositions(positions)
    context.setVelocitiesToTemperature(TEMPERATURE, options.seed + 1)
    integrator.step(SETTLING)
    integrator.setFriction(1.0)
    freedom = 3 * system.getNumParticles() - system.getNumConstraints()
    for step in range(options.steps):
        integrator.step(INNER)
        state = context.getState(positions=True, velocities=True, energy=True)
        kinetic = state.getKineticEnergy().value_in_unit(unit.kilojoule_per_mole)
        found = 2 * kinetic / (freedom * unit.MOLAR_GAS_CONSTANT_R._value * 1e-3)
        verify(150 < found < 450, f"step {step}: the water is at {found:.0f} K")
        arrays = (state.getPositions(asNumpy=True)._value, state.getVelocities(asNumpy=True)._value)
        report.step(step, digest(*arrays), loss=kinetic)
    report.done()


if __name__ == "__main__":
    guarded(main)
