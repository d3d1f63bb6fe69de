//! Pages of KV caches and recurrent states in main memory.

use std::ops::Range;

use larder_kernels::{KvPages, KvTensor};
use parking_lot::{Mutex, MutexGuard};

use crate::device::{DeviceAttention, KvPageShape, KvView};
use crate::error::Result;

/// Pages in main memory, by id.
#[derive(Default)]
pub struct CpuPages {
    state: Mutex<PageTable>,
}

/// The pages, and the ids that are free.
#[derive(Default)]
pub(crate) struct PageTable {
    pages: Vec<Page>,
    free: Vec<usize>,
}

/// The memory of a page, aligned to numbers; none where its id is free.
pub(crate) struct Page {
    pub shape: KvPageShape,
    pub values: Box<[f32]>,
}

impl Page {
    fn new(shape: KvPageShape) -> Self {
        Page { shape, values: vec![0.0; shape.bytes().div_ceil(size_of::<f32>())].into() }
    }

    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.values)[..self.shape.bytes()]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.shape.bytes();
        &mut bytemuck::cast_slice_mut(&mut self.values)[..bytes]
    }
}

impl CpuPages {
    pub(crate) fn lock(&self) -> MutexGuard<'_, PageTable> {
        self.state.lock()
    }
}

impl PageTable {
    pub fn page(&self, id: usize) -> &Page {
        &self.pages[id]
    }

    pub fn page_mut(&mut self, id: usize) -> &mut Page {
        &mut self.pages[id]
    }

    /// Moves the memory of a page out, which [`put_back`](Self::put_back) follows.
    pub fn move_out(&mut self, id: usize) -> Box<[f32]> {
        std::mem::take(&mut self.pages[id].values)
    }

    /// Moves the memory of a page back.
    pub fn put_back(&mut self, id: usize, values: Box<[f32]>) {
        self.pages[id].values = values;
    }

    /// The pages of a view.
    pub fn of<'a>(&'a self, view: &'a KvView) -> ViewPages<'a> {
        ViewPages { table: self, view }
    }
}

/// The pages of one view.
#[derive(Clone, Copy)]
pub(crate) struct ViewPages<'a> {
    table: &'a PageTable,
    view: &'a KvView,
}

impl<'a> ViewPages<'a> {
    /// The shape of a page. The caller guarantees that there is one.
    pub fn shape(&self) -> KvPageShape {
        self.table.page(self.view.pages[0]).shape
    }

    /// The rows as kernels read them. The caller guarantees that there are some.
    pub fn tensor(&'a self) -> KvTensor<'a> {
        let KvPageShape { kind, positions, row_bytes, .. } = self.shape();
        KvTensor { kind, pages: self, page_len: positions, row_bytes, width: self.view.width }
    }

    /// The bytes of a row.
    pub fn row(&self, head: usize, position: usize) -> &'a [u8] {
        let KvPageShape { positions, row_bytes, .. } = self.shape();
        let page = self.table.page(self.view.pages[position / positions - self.view.first_page]);
        &page.bytes()[(head * positions + position % positions) * row_bytes..][..row_bytes]
    }
}

impl KvPages for ViewPages<'_> {
    fn stored(&self) -> Range<usize> {
        self.view.first_page..self.view.first_page + self.view.pages.len()
    }

    fn page(&self, index: usize) -> &[u8] {
        self.table.page(self.view.pages[index - self.view.first_page]).bytes()
    }
}

impl DeviceAttention for CpuPages {
    fn allocate(&self, shape: KvPageShape) -> Result<usize> {
        let (page, mut state) = (Page::new(shape), self.lock());
        match state.free.pop() {
            Some(id) => {
                state.pages[id] = page;
                Ok(id)
            }
            None => {
                state.pages.push(page);
                Ok(state.pages.len() - 1)
            }
        }
    }

    fn free(&self, page: usize) {
        let mut state = self.lock();
        state.pages[page].values = Box::default();
        state.free.push(page);
    }

    fn append(&self, page: usize, at: usize, bytes: &[u8]) -> Result<()> {
        let mut state = self.lock();
        let page = state.page_mut(page);
        let KvPageShape { heads, positions, row_bytes, .. } = page.shape;
        let data = page.bytes_mut();
        for (i, row) in bytes.chunks_exact(row_bytes).enumerate() {
            data[(i % heads * positions + at + i / heads) * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        Ok(())
    }

    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()> {
        let mut state = self.lock();
        let (shape, values) = (state.page(from).shape, state.move_out(from));
        shape.copy_rows(bytemuck::cast_slice(&values), state.page_mut(to).bytes_mut(), len);
        state.put_back(from, values);
        Ok(())
    }

    fn read(&self, page: usize, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(self.lock().page(page).bytes());
        Ok(())
    }
}
