//! Pictures that Python gives to a model.

use std::path::PathBuf;

use anyhow::Result;
use larder_runtime::PictureFile;
use pyo3::prelude::*;

/// A picture: the content of a file, or its path.
#[derive(FromPyObject)]
pub enum PyPicture {
    /// The content.
    Content(Vec<u8>),
    /// The path.
    Path(PathBuf),
}

/// The files of pictures, which are read without the interpreter's lock.
pub fn files_of(py: Python<'_>, pictures: Vec<PyPicture>) -> Result<Vec<PictureFile>> {
    let file = |picture| match picture {
        PyPicture::Content(bytes) => Ok(bytes.into()),
        PyPicture::Path(path) => PictureFile::read(&path),
    };
    py.detach(|| pictures.into_iter().map(file).collect())
}
