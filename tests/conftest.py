"""Before JAX is imported: CPU by default, eight simulated devices, quick compilation rather than thorough."""

import gc
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
gc.set_threshold(50_000, 20, 100)  # thousands of traced programs live to the end and are not worth looking at often
flags = os.environ.get("XLA_FLAGS", "").split()
for flag, value in (("--xla_force_host_platform_device_count", 8), ("--xla_backend_optimization_level", 0)):
  if not any(given.startswith(flag) for given in flags):
    flags.append(f"{flag}={value}")
os.environ["XLA_FLAGS"] = " ".join(flags)
# programs that several tests compile are compiled once
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="jaxagent-tests-"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
