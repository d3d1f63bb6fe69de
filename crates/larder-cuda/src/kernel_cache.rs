//! A cache of compiled kernels on disk, so that they are compiled once per machine.

use std::path::{Path, PathBuf};
use std::{fs, io, process};

use larder_os::read_regular;
use twox_hash::{XxHash3_64, XxHash3_128};

/// The inputs of a compilation: the key of the cache.
pub struct KernelKey<'a> {
    pub text: &'a str,
    pub options: &'a [String],
    /// Version of the compiler, major and minor.
    pub compiler: (i32, i32),
}

/// A folder of compiled kernels (images), or none.
pub struct KernelCache(Option<PathBuf>);

impl KernelCache {
    /// The folder in the user's cache directory, if that is known.
    #[cfg(feature = "cuda")]
    pub fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let (above, name) = if cfg!(windows) { ("LOCALAPPDATA", "cache") } else { ("HOME", ".cache") };
        let base = set("XDG_CACHE_HOME").or_else(|| Some(set(above)?.join(name)));
        KernelCache(base.map(|base| base.join("larder").join("cuda")))
    }

    /// The image for this key, made by `make` if the cache does not have it. Without a folder it is made each time.
    pub fn get<E>(&self, key: &KernelKey, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        let path = self.0.as_ref().map(|folder| folder.join(key.file_name()));
        if let Some(image) = path.as_ref().and_then(|path| read(path)) {
            return Ok(image);
        }
        let image = make()?;
        if let Some(path) = path {
            // Without write access the kernels are compiled again next time.
            let _ = write(&path, &image);
        }
        Ok(image)
    }
}

impl KernelKey<'_> {
    fn file_name(&self) -> String {
        let mut hash = XxHash3_128::new();
        let mut add = |bytes: &[u8]| {
            hash.write(&(bytes.len() as u64).to_le_bytes());
            hash.write(bytes);
        };
        add(self.text.as_bytes());
        self.options.iter().for_each(|option| add(option.as_bytes()));
        let (major, minor) = self.compiler;
        add(format!("{major}.{minor}").as_bytes());
        format!("{:032x}.image", hash.finish_128())
    }
}

/// Maximum length of an image.
const IMAGE_BYTES: u64 = 256 << 20;

/// An image, unless it is missing or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut image = read_regular(path, IMAGE_BYTES).ok()?;
    let sum = image.split_off(image.len().checked_sub(8)?);
    (checksum(&image)[..] == sum[..]).then_some(image)
}

/// Writes an image atomically: other processes see the whole image or none.
fn write(path: &Path, image: &[u8]) -> io::Result<()> {
    fs::create_dir_all(path.parent().expect("the path has a folder"))?;
    let unfinished = path.with_extension(format!("{}.tmp", process::id()));
    fs::write(&unfinished, [image, &checksum(image)].concat())?;
    fs::rename(unfinished, path)
}

fn checksum(image: &[u8]) -> [u8; 8] {
    XxHash3_64::oneshot(image).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_made_once_per_key_and_again_if_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let images = KernelCache(Some(folder.path().join("made").join("here")));
        let mut made = 0;
        let mut get = |text: &str, option: &str, compiler| {
            let key = KernelKey { text, options: &[option.to_owned()], compiler };
            let image = images.get(&key, || {
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
    fn without_a_folder_images_are_made_each_time() {
        let key = KernelKey { text: "", options: &[], compiler: (1, 0) };
        assert_eq!(KernelCache(None).get(&key, || Err::<Vec<u8>, _>("no")), Err("no"));
    }
}
