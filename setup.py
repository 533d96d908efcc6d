"""Puts the files of recipes/ into the wheel, as trl_realloc/recipes/. An editable install reads them where they are."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Adds recipes, plans, models' configs and scripts; weights that a run left there stay out."""

    def run(self) -> None:
        """Copies the package's modules and the recipes to the build folder."""
        super().run()
        if self.editable_mode:
            return
        for source in Path("recipes").rglob("*"):
            if source.suffix in (".yaml", ".py", ".slurm", ".md") or source.name == "config.json":
                built = Path(self.build_lib, "trl_realloc", source)
                self.mkpath(str(built.parent))
                self.copy_file(str(source), str(built))


setup(cmdclass={"build_py": BuildWithRecipes})
