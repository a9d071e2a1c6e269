"""Before JAX is imported: CPU by default, with eight simulated devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8".strip()
