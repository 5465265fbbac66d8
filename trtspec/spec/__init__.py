"""The spec: the one YAML file that says what to build, for which GPU, how to serve it and how to check it.

`schema` is the shape, `load` reads a file into it with messages that carry file, line and key, `rules` are the
constraints between keys. This room does not know how anything is built, served or checked.
"""
