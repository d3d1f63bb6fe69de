//! The sources of the kernels, each as one text, because NVRTC may have no files to include.

use crate::code_books;

/// What sources include, those that others include last.
const HEADERS: [(&str, &str); 7] = [
    ("#include \"groups.cuh\"", include_str!("../kernels/groups.cuh")),
    ("#include \"tensor.cuh\"", include_str!("../kernels/tensor.cuh")),
    ("#include \"blocks.cuh\"", include_str!("../kernels/blocks.cuh")),
    ("#include \"attention.cuh\"", include_str!("../kernels/attention.cuh")),
    ("#include \"states.cuh\"", include_str!("../kernels/states.cuh")),
    ("#include \"activations.cuh\"", include_str!("../kernels/activations.cuh")),
    ("#include \"common.cuh\"", include_str!("../kernels/common.cuh")),
];

/// Where a source includes the code books, which are no file.
const CODE_BOOKS: &str = "#include \"code_books.cuh\"";

/// One source file.
#[derive(Clone, Copy)]
pub struct KernelSource {
    /// Name of the file in messages.
    pub file: &'static str,
    text: &'static str,
}

/// Every source. Names of kernels are unique across sources.
pub const SOURCES: [KernelSource; 15] = [
    KernelSource { file: "small_blocks.cu", text: include_str!("../kernels/small_blocks.cu") },
    KernelSource { file: "large_blocks.cu", text: include_str!("../kernels/large_blocks.cu") },
    KernelSource { file: "code_books.cu", text: include_str!("../kernels/code_books.cu") },
    KernelSource { file: "floats.cu", text: include_str!("../kernels/floats.cu") },
    KernelSource { file: "elementwise.cu", text: include_str!("../kernels/elementwise.cu") },
    KernelSource { file: "rows.cu", text: include_str!("../kernels/rows.cu") },
    KernelSource { file: "routing.cu", text: include_str!("../kernels/routing.cu") },
    KernelSource { file: "sampling.cu", text: include_str!("../kernels/sampling.cu") },
    KernelSource { file: "recurrent.cu", text: include_str!("../kernels/recurrent.cu") },
    KernelSource { file: "cca.cu", text: include_str!("../kernels/cca.cu") },
    KernelSource { file: "new_heads.cu", text: include_str!("../kernels/new_heads.cu") },
    KernelSource { file: "flash.cu", text: include_str!("../kernels/flash.cu") },
    KernelSource { file: "hyper_connections.cu", text: include_str!("../kernels/hyper_connections.cu") },
    KernelSource { file: "topk_rows.cu", text: include_str!("../kernels/topk_rows.cu") },
    KernelSource { file: "attention.cu", text: include_str!("../kernels/attention.cu") },
];

impl KernelSource {
    /// The text with each header in the place of its `#include`.
    pub fn with_includes(&self) -> String {
        let put_in = |text: String, (include, header): (&str, &str)| {
            text.replace(include, &header.replace("#pragma once\n", ""))
        };
        let text = HEADERS.into_iter().fold(self.text.to_owned(), put_in);
        if text.contains(CODE_BOOKS) { text.replace(CODE_BOOKS, &code_books::header()) } else { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_expanded() {
        for source in &SOURCES {
            let text = source.with_includes();
            assert!(!text.contains("#include") && !text.contains("#pragma once"), "{}", source.file);
            assert!(text.contains("struct ProductKernelArgs") && text.contains("__global__"), "{}", source.file);
        }
    }
}
