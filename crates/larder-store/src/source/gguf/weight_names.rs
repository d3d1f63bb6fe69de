//! The names in GGUF of single weights, whatever the architecture.

use super::{
    architectures::{ARCHITECTURES, MTP},
    remap::Rename,
};

/// The names that files of some architecture give to the weight `hub`. Almost every weight has one such name.
pub(crate) fn gguf_names(hub: &str) -> Vec<String> {
    let layer = hub.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let layer = layer.filter(|(number, _)| number.parse::<u32>().is_ok());
    let mut found: Vec<String> = vec![];
    for architecture in ARCHITECTURES {
        let names: Vec<String> = match layer {
            Some((number, part)) => {
                let renames = architecture.layer.iter().copied().flatten().chain(MTP);
                weights_of(renames, part).map(|name| format!("blk.{number}.{name}")).collect()
            }
            None => weights_of(architecture.outer.iter(), hub).map(str::to_owned).collect(),
        };
        names.into_iter().for_each(|name| {
            if !found.contains(&name) {
                found.push(name);
            }
        });
    }
    found
}

fn weights_of<'a>(renames: impl Iterator<Item = &'a Rename>, hub: &str) -> impl Iterator<Item = &'static str> {
    let names = renames.filter(move |(name, of, _)| *of == hub && name.ends_with(".weight"));
    names.map(|(name, ..)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_have_their_names_of_gguf() {
        for (hub, gguf) in [
            ("model.layers.11.self_attn.q_proj.weight", "blk.11.attn_q.weight"),
            ("model.layers.0.mlp.shared_expert.down_proj.weight", "blk.0.ffn_down_shexp.weight"),
            ("model.layers.2.eh_proj.weight", "blk.2.nextn.eh_proj.weight"),
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
        ] {
            assert_eq!(gguf_names(hub), [gguf]);
        }
        for other in ["model.layers.x.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x", ""] {
            assert!(gguf_names(other).is_empty(), "{other}");
        }
    }

    /// The weights of products that two architectures name differently; such files differ in what else they hold.
    #[test]
    fn weights_of_products_have_one_name_each() {
        let parts = ARCHITECTURES.iter().flat_map(|a| a.layer.iter().copied().flatten()).map(|(_, hub, _)| *hub);
        let several = |hub: &&str| gguf_names(&format!("model.layers.0.{hub}")).len() > 1;
        let mut found: Vec<&str> = parts.filter(|hub| !hub.contains("norm")).filter(several).collect();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found, ["attention.g_proj.weight"]);
    }
}
