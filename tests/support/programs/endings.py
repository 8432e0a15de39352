"""Ends in one of many ways: ``endings.py NAME,NAME,... FOLDER``, the name number RANK + TORCHELASTIC_RESTART_COUNT.

Whatever it writes goes below FOLDER/NAME. It is started so often that a few functions import what only they need.
"""

# ruff: noqa: SIM115
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import warnings
import weakref

kept: list[object] = []


class Talks:
    """Says goodbye, with what it finds in its module's globals."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        print("gone:", self.name, os.path.basename("/a/b"), len(kept))


class Tee:
    """The classic: stdout to the terminal and to a file, which nobody flushes."""

    def __init__(self, path: str) -> None:
        self.terminal = sys.stdout
        self.log = open(path, "w")

    def write(self, text: str) -> None:
        self.terminal.write(text)
        self.log.write(text)

    def flush(self) -> None:
        pass


# Those that end well.


def falls_off_the_end() -> None:
    print("no newline at the end", end="")


def exit_without_code() -> None:
    sys.exit()


def exit_0() -> None:
    sys.exit(0)


def exit_false() -> None:
    sys.exit(False)


def exit_256() -> None:
    sys.exit(256)


def atexit_order() -> None:
    atexit.register(print, "first registered")
    atexit.register(lambda: print("second", threading.active_count(), sys.is_finalizing()))
    weakref.finalize(Tee, print, "finalizer")
    atexit.register(lambda: 1 / 0)
    atexit.register(print, "last registered")


def threads_are_joined() -> None:
    def late() -> None:
        threading.main_thread().join()
        time.sleep(0.05)
        print("thread", threading.current_thread().name, "ends")

    threading.Thread(target=late).start()
    threading.Thread(target=signal.pause, daemon=True).start()
    atexit.register(print, "atexit after the threads")
    print("main ends")


def daemon_threads_say_nothing() -> None:
    def spin() -> None:
        while True:
            os.path.exists("/")

    threading.Thread(target=spin, daemon=True).start()
    threading.Thread(target=sys.stdin.read, daemon=True).start()


def pools_are_closed() -> None:
    import logging.handlers
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    atexit.register(print, "atexit after the pool")
    for number in range(3):
        pool.submit(lambda number=number: (time.sleep(0.01), os.write(1, b"task %d\n" % number)))
    logging.getLogger().addHandler(logging.handlers.MemoryHandler(99, target=logging.FileHandler("log.txt")))
    logging.warning("kept in memory until shutdown")


def signals_at_the_end() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
    # A function in Python: after one in C that is the last, Python 3.10 calls no handler any more.
    atexit.register(lambda: os.kill(os.getpid(), signal.SIGUSR1))


def thread_raises() -> None:
    def fail() -> None:
        raise ValueError("in a thread")

    thread = threading.Thread(target=fail, name="fails")
    thread.start()
    thread.join()


def objects_say_goodbye() -> None:
    global alone, _private
    alone, _private = Talks("global"), Talks("private global")
    kept.append(Talks("in a list"))

    def generate():
        try:
            yield
        finally:
            print("generator closed", os.path.basename("/a/c"))

    kept.append(generate())
    next(kept[-1])


def files_are_flushed() -> None:
    import gzip
    import tempfile
    import zipfile

    global plain, packed
    plain = open("plain.txt", "w")
    plain.write("plain")
    packed = gzip.open("packed.gz", "wt")
    packed.write("packed")
    kept.append(zipfile.ZipFile("archive.zip", "w"))
    kept[0].writestr("member", "text")
    local = open("closure.txt", "wb")
    local.write(b"closure")
    atexit.register(lambda: local.write(b", at exit"))
    os.kept = open("elsewhere.txt", "w")
    os.kept.write("in another module")
    kept.append(tempfile.TemporaryDirectory(dir="."))
    kept.append(tempfile.NamedTemporaryFile(dir="."))


def stdout_is_a_tee() -> None:
    sys.stdout = Tee("log.txt")
    print("to both")


def stdout_is_a_file() -> None:
    sys.stdout = open("stdout.txt", "w")
    print("to a file")


def stdout_is_closed() -> None:
    print("closing")
    sys.stdout.close()


def stdout_is_none() -> None:
    sys.stdout = None
    print("nowhere")


def os_exit_0() -> None:
    kept.append(open("unflushed.txt", "w"))
    kept[0].write("lost")
    atexit.register(print, "never")
    os._exit(0)


def child_ends_like_a_script() -> None:
    if os.fork() == 0:
        atexit.register(print, "atexit of the child")
        kept.append(Talks("the child's"))
        sys.exit(0)
    print("child:", os.waitstatus_to_exitcode(os.wait()[1]))
    if os.fork() == 0:
        raise ValueError("in the child")
    print("child:", os.waitstatus_to_exitcode(os.wait()[1]))


def warns() -> None:
    warnings.warn("a warning", stacklevel=1)
    warnings.warn("deprecated", DeprecationWarning, stacklevel=1)


def restores_ctrl_c() -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        print("caught")


def pipe_is_broken() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError):
        os.write(writer, b"x")
    print("told by an exception")


# Those that do not.


def exit_3() -> None:
    sys.exit(3)


def exit_text() -> None:
    sys.exit("no data in /here")


def exit_minus_1() -> None:
    sys.exit(-1)


def exit_true() -> None:
    sys.exit(True)


def exit_huge() -> None:
    sys.exit(1 << 70)


def exit_tuple() -> None:
    sys.exit((1, "two"))


def exit_is_subclassed() -> None:
    class Done(SystemExit):
        pass

    raise Done(4)


def os_exit_5() -> None:
    os._exit(5)


def raises() -> None:
    raise ValueError("of my own\nin two lines")


def raises_from() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        raise RuntimeError("from another") from error


def raises_while_handling() -> None:
    try:
        raise KeyError("first")
    except KeyError:
        raise OSError(2, "No such file or directory", "data.csv")  # noqa: B904


def raises_what_cannot_be_shown() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    raise Odd


def raises_base_exception() -> None:
    raise GeneratorExit("unusual")


def recurses() -> None:
    recurses()


def imports_what_is_not_there() -> None:
    import no_such_module  # noqa: F401


def imports_what_cannot_be_parsed() -> None:
    with open("bad_syntax.py", "w") as file:
        file.write("x = (\ny = 1\n")
    sys.path.insert(0, os.getcwd())
    import bad_syntax  # noqa: F401


def raises_with_objects() -> None:
    here = Talks("in the frame that raised")
    kept.append(here)
    atexit.register(lambda: print("last:", sys.last_type.__name__, sys.last_value))
    atexit.register(lambda: print("depth:", depth(sys.last_traceback)))
    raise ValueError("objects")


def depth(tb: object) -> int:
    return 0 if tb is None else 1 + depth(tb.tb_next)


def own_excepthook() -> None:
    def hook(kind: type, error: BaseException, tb: object) -> None:
        print("my hook:", kind.__name__, error, depth(tb), depth(error.__traceback__), error.__context__)

    sys.excepthook = hook
    raise ValueError("hooked")


def excepthook_raises() -> None:
    def hook(*_: object) -> None:
        raise KeyError("in the hook")

    sys.excepthook = hook
    raise ValueError("original")


def excepthook_exits() -> None:
    sys.excepthook = lambda *_: sys.exit(9)
    raise ValueError("unseen")


def excepthook_is_not_callable() -> None:
    sys.excepthook = None
    raise ValueError("original")


def interrupted() -> None:
    atexit.register(print, "atexit of the interrupted")
    kept.append(Talks("the interrupted's"))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def raises_keyboard_interrupt() -> None:
    raise KeyboardInterrupt("by hand")


def hooked_keyboard_interrupt() -> None:
    sys.excepthook = lambda *args: print("hook:", args[0].__name__)
    raise KeyboardInterrupt


def stdout_cannot_be_flushed() -> None:
    sys.stdout = open("/dev/full", "w")
    print("lost")


def raises_with_thread() -> None:
    def late() -> None:
        threading.main_thread().join()
        print("thread ends")

    threading.Thread(target=late).start()
    raise ValueError("while a thread runs")


WELL = (
    *(falls_off_the_end, exit_without_code, exit_0, exit_false, exit_256, atexit_order, threads_are_joined),
    *(
        daemon_threads_say_nothing,
        pools_are_closed,
        signals_at_the_end,
        thread_raises,
        objects_say_goodbye,
        files_are_flushed,
        stdout_is_a_tee,
        stdout_is_a_file,
        stdout_is_closed,
    ),
    *(stdout_is_none, os_exit_0, child_ends_like_a_script, warns, restores_ctrl_c, pipe_is_broken),
)
BADLY = (
    *(exit_3, exit_text, exit_minus_1, exit_true, exit_huge, exit_tuple, exit_is_subclassed, os_exit_5, raises),
    *(raises_from, raises_while_handling, raises_what_cannot_be_shown, raises_base_exception, recurses),
    *(imports_what_is_not_there, imports_what_cannot_be_parsed, raises_with_objects, own_excepthook),
    *(excepthook_raises, excepthook_exits, excepthook_is_not_callable, interrupted, raises_keyboard_interrupt),
    *(hooked_keyboard_interrupt, stdout_cannot_be_flushed, raises_with_thread),
)

if __name__ == "__main__":
    names = sys.argv[1].split(",")
    chosen = names[int(os.environ.get("RANK", "0")) + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))]
    folder = os.path.join(sys.argv[2], chosen)
    os.makedirs(folder)
    os.chdir(folder)
    globals()[chosen]()
