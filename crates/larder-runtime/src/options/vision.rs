//! Options of images in prompts.

/// When the image tower is loaded.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum VisionUse {
    /// Never: images are refused.
    #[default]
    Off,
    /// When the first image comes.
    OnDemand,
    /// At the start.
    Preload,
}

/// How a model sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VisionOptions {
    /// When the tower is loaded. The memory plan has it from the start, unless it is off.
    pub tower: VisionUse,
    /// The most tokens of an image: larger pictures are made smaller.
    pub image_tokens: usize,
}

impl Default for VisionOptions {
    /// Off.
    fn default() -> Self {
        VisionOptions { tower: VisionUse::default(), image_tokens: 4096 }
    }
}
