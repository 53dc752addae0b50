"""A model of transformers: loaded, its parts by what they do, packed forward passes, where its weights lie."""
