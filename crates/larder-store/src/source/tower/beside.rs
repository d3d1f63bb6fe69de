//! The `mmproj` file that belongs to a GGUF file: one of those in the same folder.

use std::path::{Path, PathBuf};

/// Letters that the names of files of one model begin with, at least.
const LEAST_COMMON: usize = 4;
/// How the rest of a name begins that names no model.
const UNNAMED: [&str; 6] = ["gguf", "model", "f16", "bf16", "f32", "q8"];

/// The `mmproj` file in the folder of the GGUF file `model` whose name is nearest to that of the model; `None` if there
/// is none there.
pub fn mmproj_beside(model: &Path) -> Option<PathBuf> {
    let folder = match model.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let own = model.file_name()?.to_str()?;
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| name != own && is_mmproj(name));
    names.sort_unstable();
    // The first of those that are equally near.
    names.iter().rev().max_by_key(|name| nearness(own, name)).map(|name| folder.join(name))
}

/// Whether a file of this name is an `mmproj` file.
fn is_mmproj(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("mmproj") && name.ends_with(".gguf")
}

/// How near the name of an `mmproj` file is to that of a model: by the letters that both begin with, if these are more
/// than a few; before names of other models comes a name that names none.
fn nearness(model: &str, mmproj: &str) -> (bool, bool, usize) {
    let (model, mmproj) = (model.to_ascii_lowercase(), mmproj.to_ascii_lowercase());
    let rest = mmproj.replacen("mmproj", "", 1);
    let rest = rest.trim_start_matches(['-', '_', '.']);
    let common = model.bytes().zip(rest.bytes()).take_while(|(a, b)| a == b).count();
    let names_none = UNNAMED.iter().any(|word| rest.starts_with(word));
    (common >= LEAST_COMMON, names_none, common)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("Qwen-VL-30B-Q4_K_M.gguf");
        let nearest = || mmproj_beside(&model).map(|path| path.file_name().unwrap().to_str().unwrap().to_owned());
        let add = |name: &str| std::fs::write(dir.path().join(name), "").unwrap();
        assert_eq!(nearest(), None);
        ["Qwen-VL-30B-Q4_K_M.gguf", "other.gguf", "mmproj.txt"].into_iter().for_each(add);
        assert_eq!(nearest(), None);
        ["mmproj-F16.gguf", "mmproj-BF16.gguf"].into_iter().for_each(add);
        assert_eq!(nearest().unwrap(), "mmproj-BF16.gguf");
        add("Other-8B-mmproj.gguf");
        assert_eq!(nearest().unwrap(), "mmproj-BF16.gguf");
        add("mmproj-qwen-vl-7b-f16.gguf");
        assert_eq!(nearest().unwrap(), "mmproj-qwen-vl-7b-f16.gguf");
        add("Qwen-VL-30B.mmproj-f16.gguf");
        assert_eq!(nearest().unwrap(), "Qwen-VL-30B.mmproj-f16.gguf");
    }
}
