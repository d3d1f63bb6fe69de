//! Pixels of all kinds to red, green and blue with eight bits each.

use image::DynamicImage;

use super::RgbImage;

/// Bits of precision of Pillow's blending.
const BLEND_BITS: u32 = 7;

/// The picture on white; `None` if its kind of pixels is unknown.
pub fn to_rgb(picture: DynamicImage) -> Option<RgbImage> {
    let (width, height) = (picture.width() as usize, picture.height() as usize);
    let pixels = match picture {
        DynamicImage::ImageLuma8(grey) => grey.iter().flat_map(|v| [*v; 3]).collect(),
        DynamicImage::ImageLuma16(grey) => grey.iter().flat_map(|v| [high(*v); 3]).collect(),
        DynamicImage::ImageLumaA8(grey) => grey.as_chunks().0.iter().flat_map(|[v, a]| on_white([*v; 3], *a)).collect(),
        DynamicImage::ImageLumaA16(grey) => {
            grey.as_chunks().0.iter().flat_map(|[v, a]| on_white([high(*v); 3], high(*a))).collect()
        }
        DynamicImage::ImageRgb8(rgb) => rgb.into_raw(),
        DynamicImage::ImageRgb16(rgb) => rgb.iter().map(|v| high(*v)).collect(),
        DynamicImage::ImageRgba8(rgba) => {
            rgba.as_chunks().0.iter().flat_map(|[r, g, b, a]| on_white([*r, *g, *b], *a)).collect()
        }
        DynamicImage::ImageRgba16(rgba) => {
            let blended = |[r, g, b, a]: &[u16; 4]| on_white([*r, *g, *b].map(high), high(*a));
            rgba.as_chunks().0.iter().flat_map(blended).collect()
        }
        _ => return None,
    };
    RgbImage::new(width, height, pixels)
}

fn high(value: u16) -> u8 {
    (value >> 8) as u8
}

/// A colour of some opacity over white, in the integers of Pillow.
fn on_white(colour: [u8; 3], alpha: u8) -> [u8; 3] {
    let own = u32::from(alpha) << BLEND_BITS;
    let white = (255 << BLEND_BITS) - own;
    colour.map(|value| {
        let sum = u32::from(value) * own + 255 * white + (0x80 << BLEND_BITS);
        (((sum + (sum >> 8)) >> 8) >> BLEND_BITS) as u8
    })
}
