"""Recipes as files: the form that docs/build.md shows, and what is said of one that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import recipe as recipe_module
from harness.errors import RecipeError
from harness.recipe import F16, INT8, Precision, Recipe, dump_recipe, load_recipe, summarize
from harness.spec import ModelSpec

GUIDE = Path(__file__).parents[2] / "docs" / "build.md"
SMOLLM2 = ModelSpec.from_hf_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
)


def test_the_recipe_in_the_docs_resolves_as_they_say(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "recipe.yaml"
    path.write_text(example, encoding="utf-8")
    recipe = load_recipe(path)
    # 576 inputs hold no groups of 128
    assert summarize(recipe.resolve(SMOLLM2)) == {"int8": 124, "int4-g64": 58, "int4-g64-zp": 29}
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 2\nname: x\nrules: []\n", "version"),
        ("version: 1\nname: x\nrules: [{match: '*', precisio: int8}]\n", "rules.0.precision: "),
        (
            "version: 1\nname: x\nrules: [{match: '*', precision: int3}]\n",
            "recipe.yaml, rule '*': unknown precision 'int3'",
        ),
        ("version: 1\nname: x\nrules: [{match: '*', precision: int4-g100}]\n", "32, 64, 128"),
        ("- a list\n", "the file: "),
        ("{not yaml", "is not a recipe"),
    ],
)
def test_a_wrong_recipe_is_refused_and_the_field_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=re.escape(said)) as error:
        load_recipe(path)
    assert "errors.pydantic.dev" not in str(error.value)


def test_rules_that_decide_nothing_are_named() -> None:
    int8, f16 = Precision.parse("int8"), Precision.parse("f16")
    # tied embeddings leave no lm_head; a rule behind one that takes all decides nothing either
    rules = (("*.q_prj", int8), ("lm_head", int8), ("*.q_proj", int8), ("*", int8), ("*.v_proj", f16))
    assert Recipe(name="r", rules=rules).unused_rules(SMOLLM2) == ["*.q_prj", "lm_head", "*.v_proj"]


def test_parts_of_one_matrix_that_differ_are_shown_with_what_each_has() -> None:
    rules = (("*.q_proj", Precision.parse("int8")), ("*", Precision.parse("int4-g64")))
    with pytest.raises(RecipeError, match=r"layers\.0\.self_attn\.q_proj \(int8\)") as error:
        Recipe(name="r", rules=rules).resolve(SMOLLM2)
    assert "model.layers.0.self_attn.k_proj (int4-g64)" in str(error.value)


def test_rules_that_name_a_module_are_looked_up_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's recipe has a rule for each module, of which a mixture of experts has tens of thousands."""

    def tried(_module: str, pattern: str) -> bool:
        raise AssertionError(f"{pattern} was tried as a pattern")

    named = Recipe(name="named", rules=(("a", INT8), ("b", F16), ("a", F16)))
    monkeypatch.setattr(recipe_module, "fnmatchcase", tried)
    assert [named.precision_of(module) for module in "ab"] == [INT8, F16]
    with pytest.raises(RecipeError, match="no rule for c"):
        named.precision_of("c")


def test_the_first_rule_wins_whether_it_names_or_matches() -> None:
    mixed = Recipe(name="mixed", rules=(("x*", INT8), ("xa", F16), ("ya", F16), ("y*", INT8), ("*", F16)))
    assert [mixed.precision_of(module) for module in ("xa", "xb", "ya", "yb", "z")] == [INT8, INT8, F16, INT8, F16]
