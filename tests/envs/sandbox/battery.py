"""The attacks that the tests make beyond those of the self-test: some fifty in all, of eight kinds."""

from laminar.envs.sandbox.attacks import START_ATTACKS, Attack

MORE_ATTACKS = (
    # ---------------------------------------------------------------------------------------------------------- network
    Attack(
        "network",
        "a UDP datagram",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.sendto(b'x', ('127.0.0.1', port))
escaped()
""",
    ),
    Attack(
        "network",
        "a datagram out of a socket pair",
        """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', chr(0) + socket_name + '-datagrams')
escaped()
""",
    ),
    Attack(
        "network",
        "the kernel's routing tables",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0)); escaped()",
    ),
    Attack("network", "io_uring, which no filter sees", "done(libc.syscall(425, 4, ctypes.create_string_buffer(256)))"),
    # ------------------------------------------------------------------------------------------------------- host files
    Attack("host files", "removing a file", "os.rename(file, file + '.gone'); escaped()"),
    Attack("host files", "cutting a file by its name", "os.truncate(file, 10_000); escaped()"),
    Attack("host files", "changing whose turn it is to read", "os.chmod(file, 0o600); escaped()"),
    Attack("host files", "changing when it was written", "os.utime(file); escaped()"),
    Attack("host files", "listing a folder", "os.listdir(os.path.dirname(file)); escaped()"),
    Attack(
        "host files", "a link to a file", "os.symlink(file, 'link'); assert secret in open('link').read(); escaped()"
    ),
    Attack(
        "host files",
        "the folder for everybody",
        """
open('/var/tmp/laminar-attack', 'w').close()
os.unlink('/var/tmp/laminar-attack')
escaped()
""",
    ),
    Attack("host files", "a mount of its own", "assert libc.unshare(0x10000000 | 0x20000) == 0; escaped()"),
    # ---------------------------------------------------------------------------------------- environment and processes
    Attack(
        "environment and processes",
        "anybody's environment",
        """
for n in filter(str.isdigit, os.listdir('/proc')):
    try:
        if secret.encode() in open(f'/proc/{n}/environ', 'rb').read():
            escaped()
    except OSError:
        pass
""",
    ),
    Attack(
        "environment and processes",
        "another's files",
        "assert secret in open(f'/proc/{pid}/root{file}').read(); escaped()",
    ),
    Attack(
        "environment and processes",
        "the memory of its parent",
        "open(f'/proc/{os.getppid()}/mem', 'r+b', buffering=0); escaped()",
    ),
    Attack(
        "environment and processes",
        "tracing its parent",
        """
done(libc.ptrace(0x4206, os.getppid(), 0, 0))
libc.ptrace(17, os.getppid(), 0, 0)
""",
        works_outside=False,
    ),
    Attack(
        "environment and processes",
        "reading its parent's memory",
        """
class V(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
b = ctypes.create_string_buffer(8)
v = V(ctypes.addressof(b), 8)
f = libc.process_vm_readv
f.restype = ctypes.c_ssize_t
r = f(os.getppid(), ctypes.byref(v), 1, ctypes.byref(v), 1, 0)
escaped() if r >= 0 or ctypes.get_errno() == 14 else None
""",
    ),
    # ---------------------------------------------------------------------------------------------------- shared memory
    Attack("shared memory", "the host's segments", "open(f'/dev/shm/{shared_memory}', 'r+b').close(); escaped()"),
    Attack("shared memory", "a segment that outlives it", "done(libc.shmget(0, 4096, 0o1600))", works_outside=False),
    Attack("shared memory", "a message queue", "done(libc.msgget(0x1ab0, 0o1600))", works_outside=False),
    Attack("shared memory", "memory that nobody counts", "fd = libc.memfd_create(b'x', 0); assert fd >= 0; escaped()"),
    Attack(
        "shared memory",
        "filling the host's shared memory",
        """
f = open('/dev/shm/big', 'wb')
for _ in range(40):
    f.write(bytes(2**20))
f.close()
os.unlink('/dev/shm/big')
escaped()
""",
        ends_as=("ok", "error", "files"),
    ),
    # -------------------------------------------------------------------------------------------- fork and thread bombs
    Attack(
        "fork and thread bombs",
        "processes that make processes",
        """
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
""",
        ends_as=("timeout", "cpu", "memory"),
        works_outside=False,
    ),
    Attack(
        "fork and thread bombs",
        "a hundred threads",
        """
import threading
threading.stack_size(65536)
for n in range(100):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
escaped()
""",
    ),
    # -------------------------------------------------------------------------------------------------- memory and disk
    Attack(
        "memory and disk",
        "two gigabytes in pieces",
        """
x = []
for _ in range(256):
    x.append(b'x' * 2**23)
escaped()
""",
        ends_as=("ok", "error", "memory"),
        works_outside=False,
    ),
    Attack(
        "memory and disk",
        "two gigabytes in eight processes",
        """
for _ in range(8):
    if os.fork() == 0:
        x = b'x' * (256 * 2**20)
        time.sleep(60)
        os._exit(0)
time.sleep(5)
escaped()
""",
        ends_as=("memory",),
        works_outside=False,
    ),
    Attack(
        "memory and disk",
        "a file of a gigabyte",
        """
f = open('big', 'wb')
for _ in range(1024):
    f.write(bytes(2**20))
f.flush()
escaped()
""",
        ends_as=("ok", "error", "files"),
        works_outside=False,
    ),
    Attack(
        "memory and disk",
        "a gigabyte in files",
        """
for n in range(1000):
    with open(str(n), 'wb') as f: f.write(bytes(2**20))
    time.sleep(0.001)
escaped()
""",
        ends_as=("ok", "error", "files"),
        works_outside=False,
    ),
    Attack(
        "memory and disk",
        "files without end",
        """
n = 0
while True:
    open(str(n), 'w').close()
    n += 1
    time.sleep(0.0001)
    if n == 100_000:
        escaped()
""",
        ends_as=("files", "error"),
        works_outside=False,
    ),
    # ----------------------------------------------------------------------------------------- endless loops and output
    Attack(
        "endless loops and output", "a loop in C", "sum(range(10**14))", ends_as=("timeout", "cpu"), works_outside=False
    ),
    Attack(
        "endless loops and output",
        "a sleep that hears no signal",
        """
import signal
for n in range(1, 65):
    try:
        signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(1000)
""",
        ends_as=("timeout",),
        works_outside=False,
    ),
    Attack(
        "endless loops and output",
        "output without end",
        "while True: os.write(1, b'x' * 4096)",
        ends_as=("output",),
        works_outside=False,
    ),
    # ---------------------------------------------------------------------------------------------- orphans and signals
    Attack(
        "orphans and signals",
        "a daemon",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        libc.prctl(15, b'escapee')
        time.sleep(600)
    os._exit(0)
os.wait()
""",
        works_outside=False,
    ),
    Attack(
        "orphans and signals",
        "an orphan in the group",
        """
if os.fork() == 0:
    if os.fork() == 0:
        libc.prctl(15, b'escapee')
        time.sleep(600)
    os._exit(0)
os.wait()
""",
        works_outside=False,
    ),
    Attack(
        "orphans and signals",
        "a group of its own",
        """
if os.fork() == 0:
    libc.prctl(15, b'escapee')
    try:
        os.setpgid(0, 0)
        escaped()
    finally:
        time.sleep(600)
time.sleep(0.1)
""",
        works_outside=False,
    ),
    Attack("orphans and signals", "killing its parent", "os.kill(os.getppid(), 0); escaped()"),
    Attack("orphans and signals", "killing everybody", "os.kill(-1, 0); escaped()"),
    Attack(
        "orphans and signals",
        "having the kernel kill another process",
        """
import fcntl
a, b = socket.socketpair()
fcntl.fcntl(a, fcntl.F_SETOWN, pid)
fcntl.fcntl(a, 10, 23)
escaped()
""",
    ),
    Attack(
        "orphans and signals",
        "taking its parent's limits away",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CORE); escaped()",
    ),
    Attack(
        "orphans and signals",
        "slowing its parent down",
        "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0)); escaped()",
    ),
)
ATTACKS = (*START_ATTACKS, *MORE_ATTACKS)
