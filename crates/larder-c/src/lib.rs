//! The C interface, `liblarder`: each function of `include/larder.h`.
//!
//! Options, answers and counts are JSON objects, so that another field changes no function. No panic leaves a function:
//! it becomes an error like any other.

#![allow(unsafe_code)]

mod strings;

use std::ffi::{c_char, c_void};

use anyhow::{Context, Result};
use larder_runtime::{GenerateOptions, LoadOptions, Model, PictureFile, TextPiece};
use parking_lot::Mutex;

use strings::{array_of, guarded, owned, path_of, text_of};

/// A model that is loaded. Functions that are given the same one from several threads wait for each other.
#[allow(non_camel_case_types)]
pub struct larder_model(Mutex<Model>);

/// Receives a piece of the answer: UTF-8 of `length` bytes, with a NUL behind it, valid during the call. Returning
/// false ends the answer.
#[allow(non_camel_case_types)]
pub type larder_text_fn =
    Option<unsafe extern "C" fn(text: *const c_char, length: usize, user_data: *mut c_void) -> bool>;

/// An image: the content of a PNG, JPEG, WebP or GIF file.
#[allow(non_camel_case_types)]
#[repr(C)]
pub struct larder_image {
    /// Its bytes.
    pub data: *const u8,
    /// How many there are.
    pub length: usize,
}

/// The version of the library, as in "0.1.0". Not to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn larder_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Loads a model: a store, a folder with a checkpoint, or a GGUF file, beside which a store is made the first time.
///
/// `options` is a JSON object or NULL: "cache" ("4G", "16x", "all" or "auto"), "context", "threads", "quality",
/// "routing", "eviction", "vision" and all other settings of docs/configuration.md by their names, and "models", the
/// folder of downloaded models.
///
/// Returns NULL on an error; `error`, if it is not NULL, then gets a sentence, to be freed by larder_string_free.
///
/// # Safety
///
/// `path` is a string; `options` is a string or NULL; `error` is NULL or where a pointer may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_load(
    path: *const c_char,
    options: *const c_char,
    error: *mut *mut c_char,
) -> *mut larder_model {
    let load = || {
        // SAFETY: the caller's.
        let (path, options) = unsafe { (path_of(path)?, text_of(options, "options")?) };
        let model = Model::load_with(path, &LoadOptions::from_json(options.unwrap_or_default())?)?;
        Ok(Box::into_raw(Box::new(larder_model(Mutex::new(model)))))
    };
    // SAFETY: the caller's.
    unsafe { guarded(load, error) }.unwrap_or(std::ptr::null_mut())
}

/// Generates what follows a prompt, from an empty context.
///
/// `options` is a JSON object or NULL: "max-tokens" (256), "temperature", "top-k", "top-p", "min-p",
/// "repetition-penalty", "seed", "stop" (a list of strings), "ignore-eos". Sampling that is left out is as the model's
/// files recommend. `on_text` may be NULL.
///
/// Returns a JSON object, to be freed by larder_string_free: "text", "tokens", "finish" ("end-of-text", "stop-string",
/// "length", "context" or "cancelled"), "prompt-tokens", "prefill-seconds", "decode-seconds". Returns NULL on an error,
/// as larder_load does; the model stays usable.
///
/// # Safety
///
/// `model` is from larder_load; `prompt` is a string; `options` is a string or NULL; `error` is NULL or where a pointer
/// may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_generate(
    model: *const larder_model,
    prompt: *const c_char,
    options: *const c_char,
    on_text: larder_text_fn,
    user_data: *mut c_void,
    error: *mut *mut c_char,
) -> *mut c_char {
    // SAFETY: the caller's.
    unsafe { larder_generate_with_images(model, prompt, std::ptr::null(), 0, options, on_text, user_data, error) }
}

/// As larder_generate, behind images: with the prompt they are a message of the model's chat template, if it has one.
/// A model that does not see refuses them.
///
/// # Safety
///
/// As larder_generate; `images` are `image_count` images, or NULL if there are none, and the `data` of each has
/// `length` bytes.
#[allow(clippy::too_many_arguments)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_generate_with_images(
    model: *const larder_model,
    prompt: *const c_char,
    images: *const larder_image,
    image_count: usize,
    options: *const c_char,
    on_text: larder_text_fn,
    user_data: *mut c_void,
    error: *mut *mut c_char,
) -> *mut c_char {
    let generate = || {
        // SAFETY: the caller's.
        let (model, prompt, options) =
            unsafe { (model.as_ref(), text_of(prompt, "prompt")?, text_of(options, "options")?) };
        let (model, prompt) = (model.context("model is NULL")?, prompt.context("prompt is NULL")?);
        // SAFETY: the caller's.
        let images = unsafe { files_of(images, image_count)? };
        let options = GenerateOptions { images, ..GenerateOptions::from_json(options.unwrap_or_default())? };
        let mut piece = |piece: TextPiece| match on_text.filter(|_| !piece.text.is_empty()) {
            Some(on_text) => {
                let bytes = [piece.text.as_bytes(), b"\0"].concat();
                // SAFETY: the bytes outlive the call.
                unsafe { on_text(bytes.as_ptr().cast(), piece.text.len(), user_data) }
            }
            None => true,
        };
        let mut model = model.0.lock();
        let answer = model.generate_with(prompt, &options, &mut piece)?;
        owned(serde_json::to_string(&answer)?)
    };
    // SAFETY: the caller's.
    unsafe { guarded(generate, error) }.unwrap_or(std::ptr::null_mut())
}

/// The files of images.
///
/// # Safety
///
/// `images` are `count` images, or NULL, and the `data` of each has `length` bytes, or is NULL.
unsafe fn files_of(images: *const larder_image, count: usize) -> Result<Vec<PictureFile>> {
    // SAFETY: the caller's.
    let images = unsafe { array_of(images, count, "images")? };
    // SAFETY: the caller's.
    let content = |image: &larder_image| unsafe { array_of(image.data, image.length, "the data of an image") };
    images.iter().map(|image| Ok(content(image)?.to_vec().into())).collect()
}

/// Counts since the model was loaded, as a JSON object, to be freed by larder_string_free: "slots", "hits",
/// "in-flight-hits", "misses", "evictions", "hit-rate", "read-bytes", "wait-seconds", "compute-seconds",
/// "measured-tokens", "output-kl". NULL on an error.
///
/// # Safety
///
/// `model` is from larder_load; `error` is NULL or where a pointer may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_stats(model: *const larder_model, error: *mut *mut c_char) -> *mut c_char {
    let stats = || {
        // SAFETY: the caller's.
        let model = unsafe { model.as_ref() }.context("model is NULL")?;
        let stats = model.0.lock().stats();
        owned(serde_json::to_string(&stats)?)
    };
    // SAFETY: the caller's.
    unsafe { guarded(stats, error) }.unwrap_or(std::ptr::null_mut())
}

/// Frees a string that the library returned; NULL is fine.
///
/// # Safety
///
/// `text` is such a string, not yet freed, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: it is from `owned`.
        drop(unsafe { std::ffi::CString::from_raw(text) });
    }
}

/// Frees a model; NULL is fine.
///
/// # Safety
///
/// `model` is from larder_load, not yet freed and in use by no thread, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_free(model: *mut larder_model) {
    if !model.is_null() {
        // SAFETY: it is from `larder_load`.
        drop(unsafe { Box::from_raw(model) });
    }
}
