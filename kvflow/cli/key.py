"""`kvflow key`: make a key, show it once, and say what to keep of it."""

from collections.abc import Sequence

from kvflow.cli.words import HELP, plain

KEYS = {"tenant": "the name of a tenant"}

USAGE = """\
kvflow key [tenant=NAME]

Makes a key and prints it once, with the line that stands for it in a file: of a tenant's key for the file that
auth.keys_file or KVFLOW_KEYS_FILE names; without tenant= of the admin key, for the file that admin.key_file names.
"""


def run(words: Sequence[str]) -> int:
    if any(w in HELP for w in words):
        print(USAGE, end="")
        return 0
    tenant = plain("key", words, KEYS).get("tenant")
    from kvflow.tenants.keys import hash_of, new_key
    from kvflow.tenants.tenants import check_names

    key = new_key()
    if tenant is None:
        whose, line, file = "admin key", hash_of(key), "admin.key_file"
    else:
        check_names([tenant])
        whose, line, file = f"key of {tenant}", f"{tenant} {hash_of(key)}", "auth.keys_file or KVFLOW_KEYS_FILE"
    print(f"{whose}, which is shown this once and kept nowhere:\n  {key}")
    print(f"line for the file that {file} names:\n  {line}")
    return 0
