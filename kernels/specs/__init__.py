"""KernelSpecs: what tests and benchmarks know of each op. `registry.SPECS` lists them all."""
