//! Pictures from bytes: PNG, JPEG, WebP and GIF, within limits that are checked before anything is allocated.
//!
//! The orientation in EXIF is applied, colour profiles are ignored, of several frames the first is taken, 16 bits
//! become 8 by dropping the lower ones, and transparent pixels are laid on white: as transformers does with an image
//! of Pillow.

use std::io::Cursor;

use image::codecs::{gif::GifDecoder, jpeg::JpegDecoder, png::PngDecoder, webp::WebPDecoder};
use image::error::LimitErrorKind;
use image::{DynamicImage, ImageDecoder, ImageError, Limits};

use rgb::to_rgb;

mod rgb;

/// The most bytes per pixel: eight of a decoder's output, as many to turn it, and those of the result.
const DECODER_BYTES_PER_PIXEL: u64 = 24;
/// What a decoder may take for its tables, whatever the size of the picture.
const DECODER_BYTES: u64 = 16 << 20;

/// What a picture may be at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeLimits {
    /// Bytes of the file.
    pub bytes: usize,
    /// Pixels: width times height.
    pub pixels: u64,
}

impl Default for DecodeLimits {
    /// 32 MiB and 50 million pixels.
    fn default() -> Self {
        DecodeLimits { bytes: 32 << 20, pixels: 50_000_000 }
    }
}

impl DecodeLimits {
    /// Bytes of memory that decoding takes at most.
    pub fn memory_bytes(&self) -> u64 {
        self.pixels.saturating_mul(DECODER_BYTES_PER_PIXEL).saturating_add(DECODER_BYTES)
    }
}

/// A picture: red, green and blue with eight bits each.
#[derive(Clone, PartialEq, Eq)]
pub struct RgbImage {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl RgbImage {
    /// A picture from its pixels, row by row; `None` if it is empty or the number of bytes does not fit.
    pub fn new(width: usize, height: usize, pixels: Vec<u8>) -> Option<Self> {
        let bytes = width.checked_mul(height)?.checked_mul(3)?;
        (bytes > 0 && bytes == pixels.len()).then_some(RgbImage { width, height, pixels })
    }

    /// Pixels of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows.
    pub fn height(&self) -> usize {
        self.height
    }

    /// `[height, width, 3]`
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }
}

/// The formats that can be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PictureFormat {
    /// PNG
    Png,
    /// JPEG
    Jpeg,
    /// WebP
    WebP,
    /// GIF
    Gif,
}

impl PictureFormat {
    /// The format by the first bytes of a file.
    pub fn sniff(bytes: &[u8]) -> Option<Self> {
        const SIGNATURES: [(&[u8], PictureFormat); 4] = [
            (b"\x89PNG\r\n\x1a\n", PictureFormat::Png),
            (b"\xff\xd8\xff", PictureFormat::Jpeg),
            (b"GIF87a", PictureFormat::Gif),
            (b"GIF89a", PictureFormat::Gif),
        ];
        let is_webp = bytes.len() >= 12 && bytes.starts_with(b"RIFF") && &bytes[8..12] == b"WEBP";
        let signed = SIGNATURES.iter().find(|(signature, _)| bytes.starts_with(signature)).map(|(_, format)| *format);
        signed.or(is_webp.then_some(PictureFormat::WebP))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            PictureFormat::Png => "PNG",
            PictureFormat::Jpeg => "JPEG",
            PictureFormat::WebP => "WebP",
            PictureFormat::Gif => "GIF",
        }
    }
}

/// Why a picture could not be decoded. The text repeats nothing of the file but its size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DecodeError {
    /// No file of a known format.
    #[error("the image is not a PNG, JPEG, WebP or GIF file; convert it to one of these")]
    UnknownFormat,
    /// Too many bytes.
    #[error("the image has {bytes} bytes, more than the {most} that are allowed; send a smaller one")]
    TooManyBytes {
        /// Its bytes.
        bytes: usize,
        /// The limit.
        most: usize,
    },
    /// Too many pixels.
    #[error("the image has {width} x {height} pixels, more than the {most} that are allowed; send a smaller one")]
    TooManyPixels {
        /// Its width.
        width: u32,
        /// Its height.
        height: u32,
        /// The limit.
        most: u64,
    },
    /// No pixels.
    #[error("the image has no pixels")]
    Empty,
    /// The decoder would need more memory than a picture of its size may take.
    #[error("the {0} image takes more memory to decode than an image of its size may; save it again in a plainer form")]
    TooMuchMemory(&'static str),
    /// The format has parts that are not supported.
    #[error("the {0} image uses a feature that is not supported; save it again as a PNG")]
    Unsupported(&'static str),
    /// The file is damaged.
    #[error("the {0} image is damaged or incomplete")]
    Damaged(&'static str),
}

/// Decodes a picture.
///
/// # Errors
/// If the bytes are no picture, a damaged one, or one beyond the limits.
pub fn decode(bytes: &[u8], limits: &DecodeLimits) -> Result<RgbImage, DecodeError> {
    if bytes.len() > limits.bytes {
        return Err(DecodeError::TooManyBytes { bytes: bytes.len(), most: limits.bytes });
    }
    let format = PictureFormat::sniff(bytes).ok_or(DecodeError::UnknownFormat)?;
    let (name, input) = (format.name(), Cursor::new(bytes));
    let failed = |error| failure(error, name);
    match format {
        PictureFormat::Png => {
            let most = header_limits(limits);
            read(PngDecoder::with_limits(input, most).map_err(failed)?, limits, name)
        }
        PictureFormat::Jpeg => read(JpegDecoder::new(input).map_err(failed)?, limits, name),
        PictureFormat::WebP => read(WebPDecoder::new(input).map_err(failed)?, limits, name),
        PictureFormat::Gif => read(GifDecoder::new(input).map_err(failed)?, limits, name),
    }
}

/// Reads the picture of a decoder that has read the header.
fn read<D: ImageDecoder>(mut decoder: D, limits: &DecodeLimits, name: &'static str) -> Result<RgbImage, DecodeError> {
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 {
        return Err(DecodeError::Empty);
    }
    if pixels > limits.pixels {
        return Err(DecodeError::TooManyPixels { width, height, most: limits.pixels });
    }
    let failed = |error| failure(error, name);
    let mut most = Limits::no_limits();
    most.max_alloc = Some(pixels * DECODER_BYTES_PER_PIXEL + DECODER_BYTES);
    decoder.set_limits(most).map_err(failed)?;
    let turned = decoder.orientation().map_err(failed)?;
    let mut picture = DynamicImage::from_decoder(decoder).map_err(failed)?;
    picture.apply_orientation(turned);
    to_rgb(picture).ok_or(DecodeError::Unsupported(name))
}

/// Limits of a decoder before the size of the picture is known.
fn header_limits(limits: &DecodeLimits) -> Limits {
    let mut most = Limits::no_limits();
    most.max_alloc = Some(limits.pixels.saturating_mul(DECODER_BYTES_PER_PIXEL).saturating_add(DECODER_BYTES));
    most
}

fn failure(error: ImageError, name: &'static str) -> DecodeError {
    match error {
        ImageError::Limits(limit) if limit.kind() == LimitErrorKind::InsufficientMemory => {
            DecodeError::TooMuchMemory(name)
        }
        ImageError::Limits(_) => DecodeError::TooMuchMemory(name),
        ImageError::Unsupported(_) => DecodeError::Unsupported(name),
        _ => DecodeError::Damaged(name),
    }
}
