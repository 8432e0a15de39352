"""Workers that call a function of the launcher's program, ``ddplaunch.launch(function)``.

The launcher encodes the call (``FunctionCall``) and reads the values; the worker makes the call, and agents pass the
record on unread. Only the worker's part imports torch.
"""

from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """Launcher to workers: a function, its arguments, and how the launcher's process would find its modules.

    Attributes:
        pickled: ``(function, args, kwargs)``, pickled, in base64.
        by_value: cloudpickle has pickled it, with the code of the function; only an equal Python can load that.
        python: version of the launcher's Python, as ``3.11``.
        main_path: script to import as ``__mp_main__``, because the pickle names things of ``__main__``; empty: none.
        main_module: the same for a module that ``python -m`` runs.
        search_path: folders of the launcher's ``sys.path`` that are not those of its interpreter.
        argv: ``sys.argv`` of the launcher's process.
    """

    pickled: str
    by_value: bool
    python: str
    main_path: str
    main_module: str
    search_path: tuple[str, ...]
    argv: tuple[str, ...]
