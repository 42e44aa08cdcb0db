"""Data modules: FastDataModule, ImageFolderDataModule, and a wrapper for any other."""
