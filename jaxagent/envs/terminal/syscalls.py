"""A seccomp filter: no calls that hold memory which no limit counts, or that reach into other processes or the kernel.

Resource limits do not see a memfd, or System V shared memory that is detached; a ring of io_uring works beside them.
The filter is classic BPF, written out here so that nothing needs to be installed for it.
"""

import errno
import platform
import struct

# name: number on x86_64, number on aarch64
REFUSED = {
  "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
  "semget": (64, 190), "mq_open": (240, 180), "io_uring_setup": (425, 425), "ptrace": (101, 117),
  "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "userfaultfd": (323, 282), "bpf": (321, 280),
  "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
  "pidfd_getfd": (438, 438), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
  "open_by_handle_at": (304, 265),
}  # fmt: skip
LIMITS_OF_OTHERS = (302, 261)  # prlimit64: refused for any process but the caller's own, which it names 0

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in REFUSED, AUDIT_ARCH_*
X32 = 0x40000000  # bit of the x32 calls on x86_64: the same calls under other numbers

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def seccomp_filter(machine: str = "") -> bytes:
  """The filter as an array of struct sock_filter; a refused call returns EPERM. ValueError: another machine."""
  machine = machine or platform.machine()
  if machine not in MACHINES:
    raise ValueError(f"terminal: no list of system calls for {machine!r}, only for {', '.join(MACHINES)}")
  column, architecture = MACHINES[machine]
  numbers = [row[column] for row in REFUSED.values()]
  refuse = len(numbers) + 4  # instructions from the first comparison of numbers to the refusal
  program = [
    (LOAD, 0, 0, ARCHITECTURE),
    (JUMP_EQUAL, 0, refuse + 2, architecture),
    (LOAD, 0, 0, NUMBER),
    (JUMP_AT_LEAST, refuse, 0, X32),
    *((JUMP_EQUAL, refuse - 1 - i, 0, number) for i, number in enumerate(numbers)),
    (JUMP_EQUAL, 0, 2, LIMITS_OF_OTHERS[column]),
    (LOAD, 0, 0, FIRST_ARGUMENT),
    (JUMP_EQUAL, 0, 1, 0),
    (RETURN, 0, 0, ALLOW),
    (RETURN, 0, 0, REFUSE),
  ]
  return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
