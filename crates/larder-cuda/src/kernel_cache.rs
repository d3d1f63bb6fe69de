//! Compiled kernels on disk, so that they are compiled once per machine.

use std::path::{Path, PathBuf};
use std::{fs, io, process};

use xxhash_rust::xxh3::Xxh3Default;

/// What decides what the compiler makes.
pub struct KernelKey<'a> {
    pub text: &'a str,
    pub options: &'a [String],
    /// The compiler's version.
    pub compiler: (i32, i32),
}

/// A folder of images.
pub struct KernelCache(Option<PathBuf>);

impl KernelCache {
    /// The user's, if there is a place for such things.
    #[cfg(feature = "cuda")]
    pub fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        KernelCache(base.map(|base| base.join("larder").join("cuda")))
    }

    /// The image of this recipe, made now if it was not before. Where nothing can be kept it is made each time.
    pub fn get<E>(&self, recipe: &KernelKey, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        let path = self.0.as_ref().map(|folder| folder.join(recipe.file_name()));
        if let Some(image) = path.as_ref().and_then(|path| read(path)) {
            return Ok(image);
        }
        let image = make()?;
        if let Some(path) = path {
            // Whoever cannot write compiles again next time.
            let _ = write(&path, &image);
        }
        Ok(image)
    }
}

impl KernelKey<'_> {
    fn file_name(&self) -> String {
        let mut hash = Xxh3Default::new();
        let mut add = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        add(self.text.as_bytes());
        self.options.iter().for_each(|option| add(option.as_bytes()));
        let (major, minor) = self.compiler;
        add(format!("{major}.{minor}").as_bytes());
        format!("{:032x}.image", hash.digest128())
    }
}

/// An image, unless it is not there or not whole.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut image = fs::read(path).ok()?;
    let sum = image.split_off(image.len().checked_sub(8)?);
    (checksum(&image)[..] == sum[..]).then_some(image)
}

/// Nobody ever sees half of an image.
fn write(path: &Path, image: &[u8]) -> io::Result<()> {
    fs::create_dir_all(path.parent().expect("it is in a folder"))?;
    let unfinished = path.with_extension(format!("{}.tmp", process::id()));
    fs::write(&unfinished, [image, &checksum(image)].concat())?;
    fs::rename(unfinished, path)
}

fn checksum(image: &[u8]) -> [u8; 8] {
    let mut hash = Xxh3Default::new();
    hash.update(image);
    hash.digest().to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_made_once_for_each_recipe_and_again_where_it_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let images = KernelCache(Some(folder.path().join("made").join("here")));
        let mut made = 0;
        let mut get = |text: &str, option: &str, compiler| {
            let recipe = KernelKey { text, options: &[option.to_owned()], compiler };
            let image = images.get(&recipe, || {
                made += 1;
                Ok::<_, ()>(format!("{text} {option}").into_bytes())
            });
            assert_eq!(image, Ok(format!("{text} {option}").into_bytes()));
            made
        };
        assert_eq!(get("a", "-b", (12, 8)), 1);
        assert_eq!(get("a", "-b", (12, 8)), 1);
        assert_eq!(get("a-", "b", (12, 8)), 2);
        assert_eq!(get("a", "-b", (12, 9)), 3);
        for entry in fs::read_dir(folder.path().join("made/here")).unwrap() {
            let path = entry.unwrap().path();
            let mut image = fs::read(&path).unwrap();
            image[1] ^= 1;
            fs::write(path, image).unwrap();
        }
        assert_eq!(get("a", "-b", (12, 8)), 4);
        assert_eq!(get("a", "-b", (12, 8)), 4);
    }

    #[test]
    fn without_a_place_images_are_made_each_time() {
        let recipe = KernelKey { text: "", options: &[], compiler: (1, 0) };
        assert_eq!(KernelCache(None).get(&recipe, || Err::<Vec<u8>, _>("no")), Err("no"));
    }
}
